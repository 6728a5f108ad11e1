package tieredlimit

// ForgetfulRedis makes a store ask the server each time, so that it knows every counter at every decision.
func ForgetfulRedis(store Store) Store {
	store.(*Redis).forgetful = true
	return store
}

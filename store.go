package tieredlimit

import (
	"github.com/tieredlimit/caddy-tieredlimit/store"

	// The stores that come with the module.
	_ "github.com/tieredlimit/caddy-tieredlimit/store/memory"
	_ "github.com/tieredlimit/caddy-tieredlimit/store/redis"
)

// The contract of stores, under the names by which handlers know it. Whoever writes a store imports package store alone.
type (
	Store            = store.Store
	StackSpec        = store.StackSpec
	TierSpec         = store.TierSpec
	Limit            = store.Limit
	ChargeMode       = store.ChargeMode
	Claim            = store.Claim
	State            = store.State
	Decision         = store.Decision
	Counters         = store.Counters
	Tracker          = store.Tracker
	Connector        = store.Connector
	Fallible         = store.Fallible
	Rememberer       = store.Rememberer
	SharedStore      = store.Shared
	UnavailableError = store.UnavailableError
)

// When a tier is charged.
const (
	ChargeServed  = store.ChargeServed
	ChargeChecked = store.ChargeChecked
)

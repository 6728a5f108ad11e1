//go:build race

package redis

// raceFactor is by how much long tests are cut under the race detector.
const raceFactor = 5

package figures

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
)

// Machine says when and on what kind of machine something was measured.
func Machine() string {
	load := "unknown"
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		load, _, _ = strings.Cut(string(text), " ")
	}
	return fmt.Sprintf("%s, %s, %s/%s, %d cores, load %s",
		time.Now().UTC().Format(time.DateOnly), runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), load)
}

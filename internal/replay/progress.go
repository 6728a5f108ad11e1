package replay

import (
	"fmt"
	"io"
	"os"
	"time"
)

// progressLine tells on a terminal how far a long run has come, on one line that is written over. Elsewhere it writes a
// line now and then.
type progressLine struct {
	w        io.Writer
	terminal bool
	began    time.Time
	last     time.Time
	shown    bool
}

// Times in seconds: after which a run counts as long, and between lines.
const (
	progressAfter    = 2 * time.Second
	progressTerminal = 500 * time.Millisecond
	progressElse     = 10 * time.Second
)

func newProgressLine(w io.Writer) *progressLine {
	p := &progressLine{w: w, began: time.Now()}
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		p.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

func (p *progressLine) show(done Progress) {
	now := time.Now()
	every := progressElse
	if p.terminal {
		every = progressTerminal
	}
	if now.Sub(p.began) < progressAfter || now.Sub(p.last) < every {
		return
	}
	p.last = now
	text := done.text(now.Sub(p.began))
	if p.terminal {
		fmt.Fprintf(p.w, "\r%s\x1b[K", text)
		p.shown = true
		return
	}
	fmt.Fprintln(p.w, text)
}

// text is the line.
func (d Progress) text(since time.Duration) string {
	rate := float64(d.Requests) / max(since.Seconds(), 1e-9)
	text := fmt.Sprintf("%s requests, %.0f a second, %.1f MB read", thousands(d.Requests), rate, float64(d.Read)/1e6)
	if d.Bytes > 0 {
		text += fmt.Sprintf(" (%.0f %%)", 100*float64(min(d.Read, d.Bytes))/float64(d.Bytes))
	}
	return text
}

// clear removes the line from a terminal.
func (p *progressLine) clear() {
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}

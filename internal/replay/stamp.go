package replay

import (
	"math"
	"strconv"
	"time"
)

// stampReader reads the times of log lines, in any format that Caddy's log encoders can write, and remembers which one
// the last was in.
type stampReader struct {
	layout string // for time.Parse; tried first
	custom bool   // the layout was given by the user
	coarse bool   // a time without a fraction of a second was read
	fine   bool   // one with a fraction was
}

// stampLayouts are the layouts of Caddy's named time formats. Times without a zone are taken as UTC.
var stampLayouts = []string{
	"2006-01-02T15:04:05.000Z0700", // iso8601
	"2006-01-02T15:04:05Z0700",     // the same without a fraction, as journald writes it
	time.RFC3339Nano,               // rfc3339, rfc3339_nano
	"2006/01/02 15:04:05",          // wall, wall_milli, wall_nano: a fraction is read where there is one
	"02/Jan/2006:15:04:05 -0700",   // common_log
	"2006-01-02 15:04:05",
}

// text reads a time that was written as a string. The result is in nanoseconds since the Unix epoch.
func (s *stampReader) text(value string) (int64, bool) {
	if s.layout != "" {
		if t, err := time.Parse(s.layout, value); err == nil {
			return s.accept(t)
		}
	}
	if s.custom {
		return 0, false
	}
	for _, layout := range stampLayouts {
		if t, err := time.Parse(layout, value); err == nil {
			s.layout = layout
			return s.accept(t)
		}
	}
	return s.number([]byte(value))
}

func (s *stampReader) accept(t time.Time) (int64, bool) {
	if t.Year() < 1970 || t.Year() > 2261 { // what nanoseconds in an int64 can say
		return 0, false
	}
	if t.Nanosecond() == 0 {
		s.coarse = true
	} else {
		s.fine = true
	}
	return t.UnixNano(), true
}

// number reads a time that was written as a number: seconds, milliseconds, microseconds or nanoseconds since the Unix
// epoch, told apart by their size.
func (s *stampReader) number(raw []byte) (int64, bool) {
	whole, nanos, ok := decimal(raw)
	if !ok {
		f, err := strconv.ParseFloat(string(raw), 64)
		if err != nil || !(f >= 0) || f >= math.MaxInt64/2 {
			return 0, false
		}
		whole = int64(f)
		nanos = int64((f - float64(whole)) * 1e9)
	}
	switch {
	case whole < 0:
		return 0, false
	case whole < 9e9: // seconds, until 2255
		return whole*1e9 + nanos, true
	case whole < 9e12:
		return whole*1e6 + nanos/1e3, true
	case whole < 9e15:
		return whole*1e3 + nanos/1e6, true
	}
	return whole, true
}

// decimal reads a JSON number without an exponent: its whole part, and its fraction in billionths.
func decimal(raw []byte) (whole, billionths int64, ok bool) {
	i := 0
	for ; i < len(raw) && raw[i]-'0' <= 9; i++ {
		if i >= 18 && whole > (math.MaxInt64-9)/10 {
			return 0, 0, false
		}
		whole = whole*10 + int64(raw[i]-'0')
	}
	if i == 0 {
		return 0, 0, false
	}
	if i == len(raw) {
		return whole, 0, true
	}
	if raw[i] != '.' {
		return 0, 0, false
	}
	scale := int64(1e9)
	for i++; i < len(raw); i++ {
		if raw[i]-'0' > 9 {
			return 0, 0, false
		}
		if scale /= 10; scale > 0 {
			billionths += int64(raw[i]-'0') * scale
		}
	}
	return whole, billionths, true
}

// durationUnit says what a duration that is a whole number counts.
type durationUnit uint8

const (
	unitUnknown durationUnit = iota
	unitSeconds
	unitMillis
	unitNanos
)

// nanos reads a duration. A fraction can only be of seconds, since Caddy writes milliseconds and nanoseconds as whole
// numbers; what a whole number counts is up to the unit, and milliseconds where that is not known, since hardly a
// request takes a whole number of seconds.
func (u durationUnit) nanos(raw []byte) (int64, bool) {
	whole, billionths, ok := decimal(raw)
	if !ok {
		f, err := strconv.ParseFloat(string(raw), 64)
		if err != nil || !(f >= 0) || f > 4e9 {
			return 0, false
		}
		return int64(f * 1e9), true
	}
	switch {
	case u == unitNanos && billionths == 0:
		return whole, true
	case (u == unitMillis || u == unitUnknown && whole > 0) && billionths == 0 && whole < 4e12:
		return whole * 1e6, true
	case whole < 4e9:
		return whole*1e9 + billionths, true
	}
	return 0, false
}

// durationSample is what the beginning of a log tells about its durations.
type durationSample struct {
	fractions int
	wholes    []int64
}

const mostSampled = 2000

func (d *durationSample) add(raw []byte) {
	whole, billionths, ok := decimal(raw)
	switch {
	case !ok || billionths > 0:
		d.fractions++
	case whole > 0 && len(d.wholes) < mostSampled:
		d.wholes = append(d.wholes, whole)
	}
}

// unit is the unit that the sample speaks for: any fraction means seconds; whole numbers that are mostly large are
// nanoseconds, since hardly a request takes 20 seconds, and hardly one less than 20 microseconds.
func (d *durationSample) unit() durationUnit {
	if d.fractions > 0 {
		return unitSeconds
	}
	if len(d.wholes) == 0 {
		return unitUnknown
	}
	large := 0
	for _, n := range d.wholes {
		if n >= 20000 {
			large++
		}
	}
	if large*2 > len(d.wholes) {
		return unitNanos
	}
	return unitMillis
}

package replay

import (
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/logging"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// TestEveryTimeAndDurationFormatOfCaddyIsRead writes lines by Caddy's own encoder and reads them back.
func TestEveryTimeAndDurationFormatOfCaddyIsRead(t *testing.T) {
	end := time.Date(2026, 3, 1, 23, 59, 58, 123456789, time.UTC)
	times := map[string]time.Duration{ // format, precision
		"": time.Microsecond, "unix_seconds_float": time.Microsecond, "unix_milli_float": time.Microsecond, "unix_nano": 0,
		"iso8601": time.Millisecond, "rfc3339": time.Second, "rfc3339_nano": 0, "wall": time.Second, "wall_milli": time.Millisecond,
		"wall_nano": 0, "common_log": time.Second, "2006-01-02T15:04:05.000000Z07:00": time.Microsecond,
	}
	durations := map[string]time.Duration{
		"": 0, "s": 0, "seconds": 0, "ms": time.Millisecond, "millis": time.Millisecond, "ns": 0, "string": 0,
	}
	for timeFormat, timeOff := range times {
		for durationFormat, durationOff := range durations {
			config := logging.LogEncoderConfig{TimeFormat: timeFormat, DurationFormat: durationFormat}
			enc := zapcore.NewJSONEncoder(config.ZapcoreEncoderConfig())
			l := &lineReader{want: newWanted(nil, false), sample: new(durationSample)}
			read := func(d time.Duration) *builder {
				buf, err := enc.EncodeEntry(zapcore.Entry{Time: end, LoggerName: "http.log.access", Message: "handled request"},
					[]zapcore.Field{zap.Any("request", map[string]string{"remote_ip": "1.2.3.4"}), zap.Duration("duration", d)})
				require.NoError(t, err)
				return oneLine(l, buf.String())
			}
			for i := range 50 {
				read(time.Duration(i*i) * 1234567 * time.Nanosecond)
			}
			l.unit = l.sample.unit()
			for _, d := range []time.Duration{0, 1234567 * time.Nanosecond, 40 * time.Millisecond, 2 * time.Second, 61500 * time.Millisecond} {
				b := read(d)
				require.Len(t, b.entries, 1, "%q %q: %+v", timeFormat, durationFormat, b.stats)
				e := b.entries[0]
				require.InDelta(t, d, e.duration, float64(durationOff), "%q %q", timeFormat, durationFormat)
				require.InDelta(t, end.UnixNano(), e.start+e.duration, float64(timeOff), "%q %q", timeFormat, durationFormat)
			}
		}
	}
}

func TestALayoutOfTheUsersOwn(t *testing.T) {
	s := stampReader{layout: "02.01.2006 15:04:05.000", custom: true}
	at, ok := s.text("01.03.2026 12:00:00.250")
	require.True(t, ok)
	require.Equal(t, time.Date(2026, 3, 1, 12, 0, 0, 250e6, time.UTC).UnixNano(), at)
	_, ok = s.text("2026-03-01T12:00:00Z")
	require.False(t, ok, "another format")
}

func TestNumbersAreReadExactly(t *testing.T) {
	var s stampReader
	for raw, want := range map[string]int64{
		"1772323200": 1772323200e9, "1772323200.5": 1772323200_500_000_000, "1772323200.123456789": 1772323200_123_456_789,
		"1772323200123.4567": 1772323200_123_456_700, "1772323200123456": 1772323200_123_456_000,
		"1772323200123456789": 1772323200_123_456_789, "1.7723232e9": 1772323200e9, "0": 0, "0.001": 1e6,
	} {
		got, ok := s.number([]byte(raw))
		require.True(t, ok, raw)
		require.Equal(t, want, got, raw)
	}
	for _, raw := range []string{"-1", "1e400", "1e300", "99999999999999999999"} {
		_, ok := s.number([]byte(raw))
		require.False(t, ok, raw)
	}
	for _, year := range []string{"1969-12-31T23:59:59Z", "2500-01-01T00:00:00Z"} {
		_, ok := s.text(year)
		require.False(t, ok, year)
	}
}

func TestDurationsOfWholeNumbers(t *testing.T) {
	for _, c := range []struct {
		unit durationUnit
		raw  string
		want time.Duration
		ok   bool
	}{
		{unitSeconds, "2", 2 * time.Second, true},
		{unitMillis, "2", 2 * time.Millisecond, true},
		{unitNanos, "2", 2, true},
		{unitUnknown, "2", 2 * time.Millisecond, true},
		{unitMillis, "0.002", 2 * time.Millisecond, true},
		{unitNanos, "0.5", 500 * time.Millisecond, true},
		{unitSeconds, "1e-3", time.Millisecond, true},
		{unitSeconds, "1e30", 0, false},
		{unitSeconds, "99999999999", 0, false},
		{unitSeconds, "-1", 0, false},
	} {
		got, ok := c.unit.nanos([]byte(c.raw))
		require.Equal(t, c.ok, ok, c.raw)
		if ok {
			require.InDelta(t, c.want, got, 1, c.raw)
		}
	}
}

package replay

import (
	"cmp"
	"fmt"
	"slices"
)

// merge hands out the requests of several logs in the order in which they came. A log is opened when its time has come,
// so that many rotated logs need no more memory than one.
type merge struct {
	readers *readers
	unit    durationUnit
	window  int64

	waiting []*source // not yet open, by the time at which they begin
	open    []*stream
}

// stream is an open log and its next request.
type stream struct {
	feed  *feed
	order *order
	trip  trip
}

// newMerge finds out in which order the logs are to be opened.
func newMerge(r *readers, sources []*source, unit durationUnit, window int64) (*merge, error) {
	m := &merge{readers: r, unit: unit, window: window, waiting: slices.Clone(sources)}
	if len(sources) > 1 {
		for _, s := range sources {
			if s.stdin != nil {
				continue
			}
			if err := r.probe(s); err != nil {
				return nil, fmt.Errorf("reading %s: %w", s.name, err)
			}
		}
		slices.SortStableFunc(m.waiting, func(a, b *source) int { return cmp.Compare(a.first, b.first) })
	}
	return m, nil
}

// next returns the next request and its log. It reports false at the end.
func (m *merge) next() (trip, *source, bool, error) {
	for {
		least := -1
		for i, s := range m.open {
			if least < 0 || s.trip.at < m.open[least].trip.at {
				least = i
			}
		}
		if len(m.waiting) > 0 && (least < 0 || m.waiting[0].first-m.window <= m.open[least].trip.at) {
			if err := m.begin(); err != nil {
				return trip{}, nil, false, err
			}
			continue
		}
		if least < 0 {
			return trip{}, nil, false, nil
		}
		s := m.open[least]
		t, more := s.trip, false
		if s.trip, more = s.order.pop(); !more {
			m.open = slices.Delete(m.open, least, least+1)
		}
		return t, s.order.source, true, nil
	}
}

// begin opens the first log that waits.
func (m *merge) begin() error {
	src := m.waiting[0]
	m.waiting = m.waiting[1:]
	f, err := m.readers.begin(src, m.unit)
	if err != nil {
		return fmt.Errorf("reading %s: %w", src.name, err)
	}
	s := &stream{feed: f, order: &order{source: src, next: f.next, window: m.window}}
	var more bool
	if s.trip, more = s.order.pop(); more {
		m.open = append(m.open, s)
	}
	return nil
}

// close ends the reading of logs that were not read to their end.
func (m *merge) close() {
	for _, s := range m.open {
		close(s.feed.stop)
	}
}

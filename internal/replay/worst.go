package replay

import (
	"cmp"
	"slices"
)

// worst finds those who were refused most, with room for a fixed number of them. Whoever is refused more often than the
// least in it is in it; a count may be too high by what its place had counted for others before (Metwally, Agrawal and
// El Abbadi, Efficient Computation of Frequent and Top-k Elements in Data Streams, 2005).
type worst struct {
	most  int
	index map[uint64]int // place in the heap
	heap  []offender     // the least refused at the top
}

// offender is one who was refused.
type offender struct {
	hash  uint64
	name  string
	count int64
	over  int64 // by how much the count may be too high
}

// maxWorst is how many offenders are kept.
const maxWorst = 2048

func newWorst(most int) *worst {
	return &worst{most: most, index: make(map[uint64]int)}
}

// add counts a refusal. The name is asked for if the one who was refused is new.
func (w *worst) add(hash uint64, name func() string) {
	if i, known := w.index[hash]; known {
		w.heap[i].count++
		w.sink(i)
		return
	}
	if len(w.heap) < w.most {
		w.heap = append(w.heap, offender{hash: hash, name: name(), count: 1})
		w.index[hash] = len(w.heap) - 1
		w.rise(len(w.heap) - 1)
		return
	}
	least := w.heap[0]
	delete(w.index, least.hash)
	w.heap[0] = offender{hash: hash, name: name(), count: least.count + 1, over: least.count}
	w.index[hash] = 0
	w.sink(0)
}

func (w *worst) rise(i int) {
	for i > 0 && w.heap[i].count < w.heap[(i-1)/2].count {
		w.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
}

func (w *worst) sink(i int) {
	for {
		least := i
		for _, k := range [...]int{2*i + 1, 2*i + 2} {
			if k < len(w.heap) && w.heap[k].count < w.heap[least].count {
				least = k
			}
		}
		if least == i {
			return
		}
		w.swap(i, least)
		i = least
	}
}

func (w *worst) swap(i, k int) {
	w.heap[i], w.heap[k] = w.heap[k], w.heap[i]
	w.index[w.heap[i].hash], w.index[w.heap[k].hash] = i, k
}

// top lists the n most refused, by what is certain of their counts.
func (w *worst) top(n int) []offender {
	list := slices.Clone(w.heap)
	slices.SortFunc(list, func(a, b offender) int {
		return cmp.Or(cmp.Compare(b.count-b.over, a.count-a.over), cmp.Compare(a.name, b.name))
	})
	return list[:min(n, len(list))]
}

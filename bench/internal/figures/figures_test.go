package figures

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOf(t *testing.T) {
	for _, c := range []struct {
		name   string
		values []float64
		want   Spread
	}{
		{"none", nil, Spread{}},
		{"one", []float64{3}, Spread{3, 3, 3}},
		{"odd, unsorted", []float64{9, 1, 2}, Spread{2, 1, 9}},
		{"even", []float64{4, 1, 3, 2}, Spread{2.5, 1, 4}},
	} {
		t.Run(c.name, func(t *testing.T) { assert.Equal(t, c.want, Of(c.values)) })
	}
}

func TestRatiosAreTakenWithinARound(t *testing.T) {
	got := Ratios([]float64{1, 20, 300}, []float64{2, 40, 600})
	assert.Equal(t, Spread{0.5, 0.5, 0.5}, got)
	assert.Equal(t, Spread{2, 2, 2}, Ratios([]float64{4}, []float64{2, 8}), "a round that only one side has does not count")
}

func TestDigits(t *testing.T) {
	for value, want := range map[float64]string{0.0123: "0.012", 0.5: "0.500", 1.234: "1.23", 12.34: "12.3", 1234.5: "1234"} {
		assert.Equal(t, want, Digits(value))
	}
}

func TestWrite(t *testing.T) {
	table := Table{Title: "Title", Note: "Note.", Head: []string{"a", "bb"}}
	table.Add("größer", "1")
	var b strings.Builder
	require.NoError(t, table.Write(&b))
	assert.Equal(t, "\n### Title\n\nNote.\n\n| a      | bb |\n| ------ | -- |\n| größer | 1  |\n", b.String())
}

package tieredlimit

import (
	"errors"
	"unicode"
	"unicode/utf8"
)

// foldWord in front of the parts of a key makes texts equal that people take for one.
const foldWord = "fold"

// cutFold takes the word off the parts of a key as it is written.
func cutFold(line []string) (fold bool, parts []string) {
	if len(line) > 1 && line[0] == foldWord {
		return true, line[1:]
	}
	return false, line
}

// foldSegments makes a part one that is folded. A client's address alone needs no folding, and beside text would not be
// found again.
func foldSegments(part []segment) error {
	for i := range part {
		if part[i].kind == segmentClient {
			if len(part) > 1 {
				return errors.New("the client's address cannot be folded; make it a part of its own")
			}
			return nil
		}
	}
	for i := range part {
		part[i].fold = true
	}
	return nil
}

// foldText folds what stands in buf from a place on, where it stands: letters without regard to case (Unicode's simple case
// folding), no blanks at the ends, and one in the place of several. Bytes that are not UTF-8 stay.
func foldText(buf []byte, from int) []byte {
	out, blank := from, false
	for i := from; i < len(buf); {
		r, size := rune(buf[i]), 1
		if r >= utf8.RuneSelf {
			r, size = utf8.DecodeRune(buf[i:])
		}
		i += size
		if isBlank(r) {
			blank = out > from
			continue
		}
		if blank {
			buf[out] = ' '
			out++
			blank = false
		}
		if r == utf8.RuneError && size == 1 {
			buf[out] = buf[i-1]
			out++
			continue
		}
		out += utf8.EncodeRune(buf[out:i], foldRune(r))
	}
	return buf[:out]
}

// isBlank reports whether a character is a blank, of ASCII or not.
func isBlank(r rune) bool { return r == ' ' || '\t' <= r && r <= '\r' || isBlankRune(r) }

// foldRune is the first of all characters that differ from one in case alone. None is longer in UTF-8.
func foldRune(r rune) rune {
	if r < utf8.RuneSelf {
		if 'a' <= r && r <= 'z' {
			r -= 'a' - 'A'
		}
		return r
	}
	first := r
	for other := unicode.SimpleFold(r); other != r; other = unicode.SimpleFold(other) {
		first = min(first, other)
	}
	return first
}

package terminal

// The output of a terminal that can be shown again.
//
// Invariants
//   - It holds the last bytes of output, at most its limit, under their absolute offsets.
//   - It keeps the stream of each byte in one bit. So its memory does not depend on how
//     the output was cut into writes, and a byte is found without a search.
//   - It is not safe for concurrent use: the mutex of the terminal guards it.

import (
	"math/bits"
)

// Kinds of output, which are also the tags of their frames.
const (
	kindOutput byte = 0x01
	kindError  byte = 0x02
	kindReplay byte = 0x03
)

// scrollback is a ring of output.
type scrollback struct {
	limit int      // a power of two, at least 64
	ring  []byte   // the byte at an offset is at offset modulo limit; grows up to limit
	marks []uint64 // a bit for each byte of the ring, set for kindError; nil until there is one
	total int64    // bytes there ever were
}

// first is the offset of the oldest byte that is still there.
func (s *scrollback) first() int64 { return max(0, s.total-int64(s.limit)) }

// index is the place of an offset in the ring.
func (s *scrollback) index(offset int64) int { return int(offset & int64(s.limit-1)) }

// add appends output of one kind.
func (s *scrollback) add(kind byte, data []byte) {
	if surplus := len(data) - s.limit; surplus > 0 {
		s.total += int64(surplus)
		data = data[surplus:]
	}
	s.grow(len(data))
	if kind == kindError && s.marks == nil {
		s.marks = make([]uint64, s.limit/64)
	}
	for len(data) > 0 {
		at := s.index(s.total)
		n := copy(s.ring[at:], data)
		s.mark(at, n, kind)
		s.total += int64(n)
		data = data[n:]
	}
}

// grow makes room for more bytes; once the ring has its full size, they replace the oldest.
func (s *scrollback) grow(more int) {
	if len(s.ring) == s.limit || s.total+int64(more) <= int64(len(s.ring)) {
		return
	}
	size := max(4<<10, len(s.ring))
	for size < s.limit && int64(size) < s.total+int64(more) {
		size *= 2
	}
	grown := make([]byte, min(size, s.limit))
	copy(grown, s.ring) // nothing has been replaced yet: each byte keeps its place
	s.ring = grown
}

// mark notes the kind of n bytes of the ring.
func (s *scrollback) mark(at, n int, kind byte) {
	if s.marks == nil {
		return
	}
	for n > 0 {
		in := at % 64
		some := min(n, 64-in)
		mask := (^uint64(0) >> (64 - some)) << in
		if kind == kindError {
			s.marks[at/64] |= mask
		} else {
			s.marks[at/64] &^= mask
		}
		at, n = at+some, n-some
	}
}

// read copies output of one kind from an offset on, at most len(buffer) bytes; it copies
// nothing from an offset that is not, or no longer, there.
func (s *scrollback) read(offset int64, buffer []byte) (kind byte, n int) {
	if offset < s.first() || offset >= s.total {
		return 0, 0
	}
	at := s.index(offset)
	most := int(min(int64(len(buffer)), s.total-offset, int64(len(s.ring)-at)))
	kind, most = s.run(at, most)
	return kind, copy(buffer, s.ring[at:at+most])
}

// run is the kind of a byte of the ring, and how many of the next most bytes are of it.
func (s *scrollback) run(at, most int) (kind byte, n int) {
	if s.marks == nil {
		return kindOutput, most
	}
	kind, flip := kindOutput, uint64(0)
	if s.marks[at/64]>>(at%64)&1 != 0 {
		kind, flip = kindError, ^uint64(0)
	}
	for n < most {
		in := (at + n) % 64
		others := (s.marks[(at+n)/64] ^ flip) >> in
		if others != 0 {
			return kind, min(most, n+bits.TrailingZeros64(others))
		}
		n += 64 - in
	}
	return kind, most
}

// appendSince appends all output from an offset on, of whichever kind; an offset that is no
// longer there stands for the oldest one.
func (s *scrollback) appendSince(to []byte, offset int64) []byte {
	offset = max(offset, s.first())
	if offset >= s.total {
		return to
	}
	at, end := s.index(offset), s.index(s.total)
	if at < end {
		return append(to, s.ring[at:end]...)
	}
	return append(append(to, s.ring[at:]...), s.ring[:end]...)
}

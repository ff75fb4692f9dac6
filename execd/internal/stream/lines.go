package stream

// Cuts a byte stream into the texts of output events.
//
// Invariants
//   - The concatenation of all texts is the input, byte for byte, unless they are
//     bare; no text is empty.
//   - \n, \r and \r\n end a text; \r\n is one terminator also across reads.
//   - No text is longer than MaxText bytes, so that even with six JSON bytes per
//     byte an event stays below 1 MiB; a cut never splits a UTF-8 sequence.

import (
	"bytes"
	"unicode/utf8"
)

// MaxText is the size of the longest text, in bytes.
const MaxText = 128 << 10

// KeepTerminators is the 1.1.1 form; false gives the bare lines of June.
const KeepTerminators = true

// Lines cuts what it is fed into texts.
type Lines struct {
	pending []byte
	held    bool // pending ends with \r whose \n may follow
	Bare    bool // texts lose their terminator; one that has nothing else stays "\n"
	Emit    func(text []byte)
}

func (s *Lines) feed(data []byte) {
	for len(data) > 0 {
		if s.held {
			if data[0] == '\n' {
				s.pending = append(s.pending, '\n')
				data = data[1:]
			}
			s.flush()
			continue
		}
		end := bytes.IndexByte(data, '\n')
		scope := data
		if end >= 0 {
			scope = data[:end]
		}
		if cr := bytes.IndexByte(scope, '\r'); cr >= 0 {
			s.add(data[:cr+1])
			s.held = true
			data = data[cr+1:]
			continue
		}
		if end < 0 {
			s.add(data)
			return
		}
		s.add(data[:end+1])
		s.flush()
		data = data[end+1:]
	}
}

// flush emits what is pending: a finished line, a held \r or the tail.
func (s *Lines) flush() {
	s.held = false
	if len(s.pending) > 0 {
		s.send(s.pending)
		s.pending = s.pending[:0]
	}
}

func (s *Lines) send(text []byte) {
	if !s.Bare {
		s.Emit(text)
		return
	}
	content := bytes.TrimRight(text, "\r\n")
	if len(content) == 0 {
		content = []byte{'\n'}
	}
	s.Emit(content)
}

// add appends, cutting whenever the limit is reached. One byte of room is left
// for the \n of a held \r.
func (s *Lines) add(data []byte) {
	for len(s.pending)+len(data) > MaxText-1 {
		room := MaxText - 1 - len(s.pending)
		s.pending = append(s.pending, data[:room]...)
		data = data[room:]
		whole := len(s.pending) - IncompleteSuffix(s.pending)
		s.Emit(s.pending[:whole])
		s.pending = s.pending[:copy(s.pending, s.pending[whole:])]
	}
	s.pending = append(s.pending, data...)
}

// IncompleteSuffix is the length of an unfinished UTF-8 sequence at the end.
func IncompleteSuffix(text []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if tail := text[len(text)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}

package stream

// Cutting a byte stream into the texts of output events.
//
// Invariants
//   - The concatenation of all texts is the input, byte for byte, unless the texts are bare; no text is empty.
//   - \n, \r and \r\n end a text; \r\n is one terminator, even if two reads deliver its parts.
//   - No text is longer than MaxText bytes, so that an event stays below 1 MiB even with six JSON bytes per byte of
//     text; a cut never splits a UTF-8 sequence.

import (
	"bytes"
	"unicode/utf8"
)

// MaxText is the maximum size of a text, in bytes.
const MaxText = 128 << 10

// KeepTerminators selects the form of OpenSandbox 1.1.1, in which texts keep their line terminators. The value false
// selects an older form with bare lines.
const KeepTerminators = true

// Lines cuts its input into texts and passes them to Emit.
type Lines struct {
	pending []byte
	held    bool // pending ends with \r, and a \n can follow
	Bare    bool // texts are emitted without terminators; a text of terminators only is emitted as "\n"
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

// flush emits the pending bytes: a finished line, a held \r or the tail.
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

// add appends data to the pending bytes, and emits a text whenever the limit is reached. It leaves room for one byte,
// the \n after a held \r.
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

// IncompleteSuffix returns the length of an unfinished UTF-8 sequence at the end of a text.
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

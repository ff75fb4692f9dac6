// Package stream implements event streams and reads the output of programs for them. An event stream is a sequence of
// ASCII JSON objects, each followed by a blank line.
//
// Invariants
//   - Nothing is written after the terminal event, and at most one terminal event is written.
//   - Events are written whole: after a failed write nothing more is written.
//   - A client that stops reading blocks a writer for the answer limit of its connection at most.
package stream

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	// PingInterval is the time between two pings.
	PingInterval = 3 * time.Second
	streamBatch  = 64 << 10
	streamGather = 5 * time.Millisecond // events within this time after the start are sent together
)

// Stream is an event stream to one client.
type Stream struct {
	writer     http.ResponseWriter
	controller *http.ResponseController
	mutex      sync.Mutex
	buffer     []byte
	gathering  *time.Timer // runs for streamGather after Begin; else nil
	failure    error       // of the first write that failed
	finished   bool
}

// New makes a stream and sets the headers, which are sent with the first event.
func New(w http.ResponseWriter) *Stream {
	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-cache")
	header.Set("X-Accel-Buffering", "no")
	return &Stream{writer: w, controller: http.NewResponseController(w)}
}

// appendHead appends the beginning of an event object, without the closing brace.
func appendHead(buffer []byte, kind, text string) []byte {
	buffer = append(buffer, `{"type":"`...)
	buffer = append(buffer, kind...)
	buffer = append(buffer, '"')
	if text != "" {
		buffer = append(buffer, `,"text":`...)
		buffer = appendQuoted(buffer, text)
	}
	buffer = append(buffer, `,"timestamp":`...)
	return strconv.AppendInt(buffer, time.Now().UnixMilli(), 10)
}

const eventEnd = "}\n\n"

// Begin queues the init event and the first ping; they are sent within streamGather. Most commands end within that
// time, so that all their events are sent together. Each separate write would wake every process on the way to the
// client.
func (s *Stream) Begin(id string) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.buffer = append(appendHead(s.buffer, "init", id), eventEnd...)
	s.buffer = append(appendHead(s.buffer, "ping", "pong"), eventEnd...)
	s.gathering = time.AfterFunc(streamGather, s.gathered)
}

func (s *Stream) gathered() {
	s.mutex.Lock()
	s.gathering = nil
	s.mutex.Unlock()
	s.Flush()
}

// Ping sends a ping.
func (s *Stream) Ping() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if !s.finished {
		s.buffer = append(appendHead(s.buffer, "ping", "pong"), eventEnd...)
		s.push()
	}
}

// PingUntil sends pings until done is closed.
func (s *Stream) PingUntil(done <-chan struct{}) {
	ticker := time.NewTicker(PingInterval)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			return
		case <-ticker.C:
			s.Ping()
		}
	}
}

// Text queues an output event; Flush sends the queued events.
func (s *Stream) Text(kind string, text []byte) {
	s.queue(func(buffer []byte) []byte { return appendHead(buffer, kind, string(text)) })
}

// Count queues an event with the number of an execution.
func (s *Stream) Count(number int) {
	s.queue(func(buffer []byte) []byte {
		buffer = append(appendHead(buffer, "execution_count", ""), `,"execution_count":`...)
		return strconv.AppendInt(buffer, int64(number), 10)
	})
}

// Result queues an event with a result of code: MIME types and their values.
func (s *Stream) Result(values map[string]string) {
	s.queue(func(buffer []byte) []byte {
		buffer = append(appendHead(buffer, "result", ""), `,"results":{`...)
		for i, kind := range slices.Sorted(maps.Keys(values)) {
			if i > 0 {
				buffer = append(buffer, ',')
			}
			buffer = append(appendQuoted(buffer, kind), ':')
			buffer = appendQuoted(buffer, values[kind])
		}
		return append(buffer, '}')
	})
}

// CodeError queues an event with an error of code. It does not end the stream.
func (s *Stream) CodeError(name, value string, traceback []string) {
	s.queue(func(buffer []byte) []byte { return appendError(buffer, name, value, traceback) })
}

func (s *Stream) queue(event func(buffer []byte) []byte) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.failure != nil || s.finished {
		return
	}
	s.buffer = append(event(s.buffer), eventEnd...)
	if len(s.buffer) >= streamBatch {
		s.push()
	}
}

// Flush sends the queued events, except during the first streamGather.
func (s *Stream) Flush() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if !s.finished && s.gathering == nil {
		s.push()
	}
}

// Complete sends the terminal event of success. If it returns an error, the handler must abort the connection, so that
// the transfer does not look complete.
func (s *Stream) Complete(elapsed time.Duration) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.buffer = appendHead(s.buffer, "execution_complete", "")
	if ms := elapsed.Milliseconds(); ms > 0 {
		s.buffer = append(s.buffer, `,"execution_time":`...)
		s.buffer = strconv.AppendInt(s.buffer, ms, 10)
	}
	return s.end()
}

// Fail sends the terminal event of failure. Its error has the same meaning as that of Complete.
func (s *Stream) Fail(name, value string, traceback []string) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.buffer = appendError(s.buffer, name, value, traceback)
	return s.end()
}

// appendError appends the beginning of an error event, without the closing brace.
func appendError(buffer []byte, name, value string, traceback []string) []byte {
	buffer = append(appendHead(buffer, "error", ""), `,"error":{"ename":`...)
	buffer = append(appendQuoted(buffer, name), `,"evalue":`...)
	buffer = append(appendQuoted(buffer, value), `,"traceback":[`...)
	for i, line := range traceback {
		if i > 0 {
			buffer = append(buffer, ',')
		}
		buffer = appendQuoted(buffer, line)
	}
	return append(buffer, ']', '}')
}

// end closes the object of the terminal event and sends it. It returns the error of the first write that failed. The
// caller holds the mutex.
func (s *Stream) end() error {
	if s.gathering != nil {
		s.gathering.Stop()
	}
	s.buffer = append(s.buffer, eventEnd...)
	s.push()
	s.finished = true
	return s.failure
}

// push writes the buffer. The caller holds the mutex.
func (s *Stream) push() {
	pending := s.buffer
	s.buffer = s.buffer[:0]
	if len(pending) == 0 || s.failure != nil {
		return
	}
	if _, err := s.writer.Write(pending); err != nil {
		s.failure = err
		return
	}
	s.failure = s.controller.Flush()
}

const hexDigits = "0123456789abcdef"

// appendQuoted appends a JSON string in ASCII; undecodable bytes become U+FFFD.
func appendQuoted(buffer []byte, text string) []byte {
	buffer = append(buffer, '"')
	start := 0
	for i := 0; i < len(text); {
		c := text[i]
		if c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\' && c != 0x7f {
			i++
			continue
		}
		buffer = append(buffer, text[start:i]...)
		size := 1
		switch {
		case c == '"' || c == '\\':
			buffer = append(buffer, '\\', c)
		case c == '\n':
			buffer = append(buffer, '\\', 'n')
		case c == '\r':
			buffer = append(buffer, '\\', 'r')
		case c == '\t':
			buffer = append(buffer, '\\', 't')
		case c < utf8.RuneSelf:
			buffer = appendUnit(buffer, uint32(c))
		default:
			var r rune
			r, size = utf8.DecodeRuneInString(text[i:])
			if r >= 0x10000 {
				offset := uint32(r) - 0x10000
				buffer = appendUnit(buffer, 0xd800+offset>>10)
				buffer = appendUnit(buffer, 0xdc00+offset&0x3ff)
			} else {
				buffer = appendUnit(buffer, uint32(r))
			}
		}
		i += size
		start = i
	}
	buffer = append(buffer, text[start:]...)
	return append(buffer, '"')
}

func appendUnit(buffer []byte, unit uint32) []byte {
	return append(buffer, '\\', 'u', hexDigits[unit>>12&15], hexDigits[unit>>8&15], hexDigits[unit>>4&15], hexDigits[unit&15])
}

// Package stream has event streams: bare ASCII-only JSON objects, each followed by a blank
// line, and the output of programs that goes into them.
//
// Invariants
//   - Nothing is written after the terminal event, and at most one is written.
//   - Events of a stream are whole: a failed write ends the stream for good.
//   - A client that stops reading holds a writer for the answer limit of its connection at most.
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
	// PingInterval is the time between two signs of life.
	PingInterval = 3 * time.Second
	streamBatch  = 64 << 10
	streamGather = 5 * time.Millisecond // what comes this soon after the start goes out in one piece
)

// Stream is an event stream to one client.
type Stream struct {
	writer     http.ResponseWriter
	controller *http.ResponseController
	mutex      sync.Mutex
	buffer     []byte
	gathering  *time.Timer // nil once its time is over
	failure    error       // of the first write that failed
	finished   bool
}

// New sets the headers; they go out with the first event.
func New(w http.ResponseWriter) *Stream {
	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-cache")
	header.Set("X-Accel-Buffering", "no")
	return &Stream{writer: w, controller: http.NewResponseController(w)}
}

// appendHead opens an event object, up to but without the closing brace.
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

// Begin queues init and the first ping; they go out within streamGather. Most commands
// are over by then: for each piece every process on the way to the client wakes up.
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

// Ping sends a sign of life.
func (s *Stream) Ping() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if !s.finished {
		s.buffer = append(appendHead(s.buffer, "ping", "pong"), eventEnd...)
		s.push()
	}
}

// PingUntil sends pings until something is over.
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

// Text queues an output event; flush sends what is queued.
func (s *Stream) Text(kind string, text []byte) {
	s.queue(func(buffer []byte) []byte { return appendHead(buffer, kind, string(text)) })
}

// Count queues the number of an execution.
func (s *Stream) Count(number int) {
	s.queue(func(buffer []byte) []byte {
		buffer = append(appendHead(buffer, "execution_count", ""), `,"execution_count":`...)
		return strconv.AppendInt(buffer, int64(number), 10)
	})
}

// Result queues a result of code: MIME types and their values.
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

// CodeError queues an error of code, which is not the end of its stream.
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

// Flush sends what is queued, once the time to gather is over.
func (s *Stream) Flush() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if !s.finished && s.gathering == nil {
		s.push()
	}
}

// Complete sends the terminal event of success. After an error the handler must abort
// the connection, so that the transfer looks broken.
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

// Fail sends the terminal event of failure; its error is that of Complete.
func (s *Stream) Fail(name, value string, traceback []string) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.buffer = appendError(s.buffer, name, value, traceback)
	return s.end()
}

// appendError opens an error event, up to but without the closing brace.
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

// end closes the object of the terminal event, and returns the error of the first write
// that failed; the caller holds the mutex.
func (s *Stream) end() error {
	if s.gathering != nil {
		s.gathering.Stop()
	}
	s.buffer = append(s.buffer, eventEnd...)
	s.push()
	s.finished = true
	return s.failure
}

// push writes the buffer; the caller holds the mutex.
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

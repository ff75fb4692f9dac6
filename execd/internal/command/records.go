package command

// The records of running and finished commands.
//
// Invariants
//   - A record exists before its id is sent to the client. Every reader sees it first as running, then as finished; a
//     finished record does not change.
//   - A running record is never removed.
//   - Finished records are bounded in number and age (24 h). The number of those with output is also bounded;
//     stream/log.go bounds the bytes of the output.

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/stream"
)

const (
	recordAge       = 24 * time.Hour
	recordSweep     = time.Hour
	finishedLimit   = 4096
	finishedOutputs = 256
	recordTextLimit = 16 << 10
)

type record struct {
	id         string
	content    string
	background bool
	started    time.Time
	process    *process.Process // nil if the start failed
	output     *stream.Log      // nil for a foreground command
	done       chan struct{}

	mutex       sync.Mutex
	finished    time.Time // zero while running
	exitCode    int
	failure     string
	timedOut    bool
	interrupted time.Time
}

func (r *record) running() bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.finished.IsZero()
}

// Records holds the records of all commands.
type Records struct {
	outputs *stream.Store

	mutex    sync.Mutex
	byID     map[string]*record
	ended    []*record // finished, oldest first
	lastScan time.Time
}

// NewRecords returns an empty table.
func NewRecords() *Records {
	return &Records{outputs: stream.NewStore(), byID: map[string]*record{}, lastScan: time.Now()}
}

// recordText returns the beginning of a text, at most recordTextLimit bytes. It is a copy, because otherwise the record
// would keep the whole request in memory.
func recordText(text string) string {
	if len(text) <= recordTextLimit {
		return strings.Clone(text)
	}
	return strings.Clone(wholeCharacters(text[:recordTextLimit]))
}

// recordFailure shortens the text of an error to recordTextLimit bytes: its beginning and its end, because the end has
// the reason.
func recordFailure(text string) string {
	const gap, end = " ... ", 1 << 10
	if len(text) <= recordTextLimit {
		return text
	}
	tail := text[len(text)-end:]
	for !utf8.RuneStart(tail[0]) && len(tail) > end-utf8.UTFMax {
		tail = tail[1:]
	}
	return wholeCharacters(text[:recordTextLimit-end-len(gap)]) + gap + tail
}

// wholeCharacters removes an incomplete UTF-8 sequence from the end of a shortened text.
func wholeCharacters(text string) string {
	return text[:len(text)-stream.IncompleteSuffix([]byte(text[len(text)-utf8.UTFMax:]))]
}

// add makes a record visible. The caller has reserved a slot for its command.
func (t *Records) add(r *record) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.byID[r.id] = r
}

// finish finishes a record. It is called exactly once per record.
func (t *Records) finish(r *record, result process.Outcome) {
	r.mutex.Lock()
	r.finished = time.Now()
	r.exitCode, r.failure, r.timedOut = result.ExitCode, result.Failure, result.TimedOut
	r.mutex.Unlock()
	close(r.done)
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.ended = append(t.ended, r)
	t.evict(time.Now())
}

func (t *Records) get(id string) *record {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if now := time.Now(); now.Sub(t.lastScan) > recordSweep {
		t.evict(now)
	}
	return t.byID[id]
}

// all returns the current records.
func (t *Records) all() []*record {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return slices.Collect(maps.Values(t.byID))
}

// forgetAll removes all records. The caller has checked that all commands have ended.
func (t *Records) forgetAll() {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, r := range t.ended {
		if r.output != nil {
			r.output.Close()
		}
	}
	t.byID, t.ended = map[string]*record{}, nil
}

// evict removes the oldest finished records, so that no remaining one exceeds a bound. The caller holds the mutex.
func (t *Records) evict(now time.Time) {
	t.lastScan = now
	outputs := 0
	keep := len(t.ended)
	for i := len(t.ended) - 1; i >= 0; i-- { // newest first
		r := t.ended[i]
		if r.output != nil && r.output.Files() > 0 {
			outputs++
		}
		if now.Sub(r.finished) > recordAge || len(t.ended)-i > finishedLimit || outputs > finishedOutputs {
			break
		}
		keep = i
	}
	for _, r := range t.ended[:keep] {
		delete(t.byID, r.id)
		if r.output != nil {
			r.output.Close()
		}
	}
	t.ended = append([]*record(nil), t.ended[keep:]...)
}

package command

// The records of running and finished commands.
//
// Invariants
//   - A record exists before its id leaves the daemon and is consistent for
//     every reader: running, then finished once and for all.
//   - A running record is never removed.
//   - Finished records are bounded by count and age (24 h), and by the number of those with
//     output; stream/log.go bounds its bytes.

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
	output     *stream.Log      // background only
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

// Records is the table of all commands.
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

// recordText is the beginning of a text, as a record keeps it: a copy, or the record would
// hold all of a request.
func recordText(text string) string {
	if len(text) <= recordTextLimit {
		return strings.Clone(text)
	}
	return strings.Clone(wholeCharacters(text[:recordTextLimit]))
}

// recordFailure is the text of an error: the beginning, and the end, which has the reason.
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

// wholeCharacters is a text that was cut without the UTF-8 sequence it may have been cut in.
func wholeCharacters(text string) string {
	return text[:len(text)-stream.IncompleteSuffix([]byte(text[len(text)-utf8.UTFMax:]))]
}

// add makes a record visible; its place was reserved.
func (t *Records) add(r *record) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.byID[r.id] = r
}

// finish ends a record, exactly once per record.
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

// all is a snapshot of the records.
func (t *Records) all() []*record {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return slices.Collect(maps.Values(t.byID))
}

// ForgetAll forgets every record of a command that has ended; the caller knows that all have.
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

// evict drops finished records that are too old or too many; lock held.
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

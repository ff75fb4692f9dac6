package isolate

// Background runs of isolated sessions, and their consequences: when a session is idle, and
// what is kept of a session whose processes have ended.
//
// The server of a session starts the runs and reports them (reports.go). The daemon keeps
// their output, like that of commands, and answers requests about them.
//
// Invariants
//   - A session is idle when no request to it is in progress and each reported run has ended.
//     It does not matter whether and how fast its server answers.
//   - Only its client can remove a session that is not idle. One whose processes have ended stays,
//     with its runs, until its client removes it or its time is over.
//   - Runs and their output are bounded: a session in its runs, all sessions together in bytes
//     and files. Sessions whose processes have ended also in time, and they make room for new ones.
//   - The daemon knows a run before its client gets the answer.

import (
	"net/http"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/stream"
)

const (
	runLimit   = 256 // in the background of a session, finished ones too
	logLimit   = 16 << 20
	logsLimit  = 256 << 20      // of all sessions
	fileLimit  = 4096           // files of all logs
	deadAge    = 24 * time.Hour // of sessions that have died
	tailPrefix = "EXECD-ISOLATED-TAIL-"
	runHeader  = "Execd-Run" // header of an answer inside: which run the daemon is to know of
)

// kept says what is kept of runs.
type kept struct {
	outputs *stream.Store
	rest    *process.Leftovers // pipes of what runs left running; apart from those of commands
	files   int                // of all logs
	age     time.Duration      // of sessions that have died
}

func newKept() kept {
	outputs := stream.NewStore()
	outputs.Each, outputs.Total = logLimit, logsLimit
	return kept{outputs: outputs, rest: process.NewLeftovers(), files: fileLimit, age: deadAge}
}

// backgroundRun is a run in the background. It has also finished when its session has ended.
type backgroundRun struct {
	id      string
	started time.Time
	output  *stream.Log
	settle  func() // returns when its output is in its log
	cut     bool   // it ended with its session; guarded by the mutex of Isolation

	mutex    sync.Mutex
	finished time.Time // zero while running
	result   process.Outcome
}

func (b *backgroundRun) running() bool {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.finished.IsZero()
}

// follow takes the reports of a session until its process has ended.
func (i *Isolation) follow(followed *session) {
	for {
		report, pipe, err := receiveReport(followed.helper.Control)
		if err == nil {
			err = i.take(followed, report, pipe)
		}
		if err != nil {
			if pipe != nil {
				pipe.Close()
			}
			break
		}
	}
	// Its server ends when this connection does; one that breaks the rules is not asked.
	followed.helper.Process.SignalGroup(syscall.SIGKILL)
	<-followed.helper.Process.Done
	i.died(followed)
	close(followed.told)
}

// take records a report. Without an error it also takes the pipe.
func (i *Isolation) take(from *session, report runReport, pipe *os.File) error {
	i.mutex.Lock()
	known, count := from.runs[report.run], len(from.runs)
	i.mutex.Unlock()
	switch {
	case report.kind == reportBegun && known == nil && count < runLimit:
		i.begun(from, report, pipe)
	case report.kind == reportEnded && known != nil && known.running():
		known.settle()
		known.finish(report.at, process.OutcomeOf(report.status))
		i.mutex.Lock()
		from.running--
		i.note(from, true)
		i.dropLogs()
		i.mutex.Unlock()
	default:
		return errBadReport
	}
	return nil
}

func (i *Isolation) begun(in *session, report runReport, pipe *os.File) {
	run := &backgroundRun{id: report.run, started: report.at, output: i.kept.outputs.Open(i.newLogFile)}
	run.settle = (&stream.Pipe{File: pipe}).KeepIn(run.output, i.kept.rest)
	i.mutex.Lock()
	defer i.mutex.Unlock()
	in.runs[run.id] = run
	in.running++
	close(in.changed)
	in.changed = make(chan struct{})
	i.note(in, true)
}

// newLogFile creates the file beside what sessions write, if that is possible. Logs of sessions have one limit
// for all places, so a file in memory counts like any other.
func (i *Isolation) newLogFile() (*os.File, int64, error) {
	file, err := stream.NamelessFile(i.root)
	if err != nil {
		file, _, err = stream.NewFile()
	}
	return file, 1, err
}

// finish ends a run. Later calls do nothing.
func (b *backgroundRun) finish(at time.Time, result process.Outcome) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.finished, b.result = at, result
}

// died records the end of a session's processes: no run is left in it.
func (i *Isolation) died(ended *session) {
	var cut []*backgroundRun
	i.mutex.Lock()
	for _, run := range ended.runs {
		if run.running() {
			cut = append(cut, run)
		}
	}
	i.mutex.Unlock()
	for _, run := range cut {
		run.settle()
	}
	i.mutex.Lock()
	defer i.mutex.Unlock()
	ended.ended = time.Now()
	for _, run := range cut {
		run.cut = true
		run.finish(ended.ended, process.Outcome{Failure: "session terminated"})
		ended.running--
	}
	if len(cut) > 0 {
		i.note(ended, true)
	}
	i.rest(ended)
	i.dropLogs()
}

// dropLogs drops logs of ended runs if there are too many files: first those of sessions whose processes
// have ended, the oldest first. The mutex is held.
func (i *Isolation) dropLogs() {
	var ended []*backgroundRun
	dead := map[*backgroundRun]bool{}
	files := 0
	for _, each := range i.byID {
		for _, run := range each.runs {
			held := run.output.Files()
			files += held
			if held > 0 && !run.running() {
				ended = append(ended, run)
				dead[run] = !each.ended.IsZero()
			}
		}
	}
	if files <= i.kept.files {
		return
	}
	slices.SortFunc(ended, func(a, b *backgroundRun) int {
		if dead[a] != dead[b] {
			if dead[a] {
				return -1
			}
			return 1
		}
		return a.started.Compare(b.started)
	})
	for _, run := range ended {
		if files <= i.kept.files {
			return
		}
		files -= run.output.Files()
		run.output.Close()
	}
}

// await waits until a run was reported; false if that is not possible any more.
func (i *Isolation) await(r *http.Request, in *session, id string) bool {
	for {
		i.mutex.Lock()
		known, changed := in.runs[id] != nil, in.changed
		i.mutex.Unlock()
		if known {
			return true
		}
		select {
		case <-changed:
		case <-in.told:
			return false
		case <-r.Context().Done():
			return false
		}
	}
}

// awaitReported delays the answer to a run until the daemon knows the run that it names.
func (i *Isolation) awaitReported(in *session, response *http.Response) error {
	id := response.Header.Get(runHeader)
	response.Header.Del(runHeader)
	if id != "" && !i.await(response.Request, in, id) {
		return errBadReport
	}
	return nil
}

// held reports whether a session has an active request or run; mutex held.
func (s *session) held() bool { return s.active > 0 || s.running > 0 }

// deadline returns when a session without a request or run is removed, zero for never. The mutex is held.
func (i *Isolation) deadline(of *session) (at time.Time) {
	if limit := of.idleLimit(); limit > 0 {
		at = of.used.Add(limit)
	}
	if of.ended.IsZero() {
		return at
	}
	if last := of.ended.Add(i.kept.age); at.IsZero() || last.Before(at) {
		at = last
	}
	return at
}

// rest restarts the idle timer of a session. The mutex is held.
func (i *Isolation) rest(resting *session) {
	if resting.timer != nil {
		resting.timer.Stop()
		resting.timer = nil
	}
	at := i.deadline(resting)
	if at.IsZero() || resting.held() || i.byID[resting.id] != resting {
		return
	}
	resting.timer = time.AfterFunc(time.Until(at), func() { i.expire(resting) })
}

// expire removes a session whose time is over, unless it was used in the meantime.
func (i *Isolation) expire(expired *session) {
	i.mutex.Lock()
	at := i.deadline(expired)
	over := i.byID[expired.id] == expired && !expired.held() && !at.IsZero() && time.Until(at) <= 0
	if over {
		delete(i.byID, expired.id)
	}
	i.mutex.Unlock()
	if over {
		i.discard(expired)
	}
}

// use finds a session for a request or a run. Each use needs a release.
func (i *Isolation) use(id string, run bool) (*session, error) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	found := i.byID[id]
	if found == nil {
		return nil, sessionNotFound(id)
	}
	found.active++
	i.note(found, run)
	return found, nil
}

func (i *Isolation) release(released *session, run bool) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	released.active--
	i.note(released, run)
}

// note records the begin or the end of a request or of a run in the background. The mutex is held.
func (i *Isolation) note(noted *session, run bool) {
	noted.used = time.Now()
	if run {
		noted.ran = noted.used
	}
	i.rest(noted)
}

// makeRoom removes the session whose processes ended first; false if all have processes.
func (i *Isolation) makeRoom() bool {
	i.mutex.Lock()
	var oldest *session
	for _, each := range i.byID {
		if !each.ended.IsZero() && each.active == 0 && (oldest == nil || each.ended.Before(oldest.ended)) {
			oldest = each
		}
	}
	i.mutex.Unlock()
	return oldest != nil && i.remove(oldest.id)
}

type runStatus struct {
	SessionID  string     `json:"session_id"`
	RunID      string     `json:"run_id"`
	Running    bool       `json:"running"`
	ExitCode   *int       `json:"exit_code,omitempty"`
	Error      string     `json:"error,omitempty"`
	StartedAt  time.Time  `json:"started_at"`
	FinishedAt *time.Time `json:"finished_at,omitempty"`

	OutputDropped int64 `json:"output_dropped,omitempty"` // bytes
}

// serveRun answers about a run, also after its session has ended.
func (i *Isolation) serveRun(w http.ResponseWriter, r *http.Request, of *session, parts []string) {
	if of.dead() { // what its server reported before is still on its way
		select {
		case <-of.told:
		case <-r.Context().Done():
			return
		}
	}
	i.mutex.Lock()
	run := of.runs[parts[1]]
	cut := run != nil && run.cut
	i.mutex.Unlock()
	if run == nil {
		httpx.WriteError(w, httpx.NewProblem(http.StatusNotFound, "RUN_NOT_FOUND", "run "+parts[1]+" not found"))
		return
	}
	if len(parts) == 3 {
		run.output.Serve(w, r, run.running, tailPrefix)
		return
	}
	status := run.status(of.id)
	if cut {
		status.ExitCode = nil
	}
	httpx.WriteJSON(w, http.StatusOK, status)
}

func (b *backgroundRun) status(session string) runStatus {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	status := runStatus{
		SessionID: session, RunID: b.id, Running: b.finished.IsZero(), StartedAt: b.started.UTC(), OutputDropped: b.output.Dropped(),
	}
	if !status.Running {
		code, finished := b.result.ExitCode, b.finished.UTC()
		status.ExitCode, status.FinishedAt, status.Error = &code, &finished, b.result.Failure
	}
	return status
}

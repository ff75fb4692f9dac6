package command

// The routes for the status, logs and interrupt of commands.
//
// Invariants
//   - Cursors are byte offsets. The concatenated pages are the output without its dropped parts. The answer to a cursor
//     in a dropped part contains the output after that part and the number of missing bytes.
//   - An interrupt that is repeated within a minute succeeds again, also if the command has ended.

import (
	"errors"
	"net/http"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
)

type commandStatus struct {
	ID         string     `json:"id"`
	Content    string     `json:"content,omitempty"`
	Running    bool       `json:"running"`
	ExitCode   *int       `json:"exit_code,omitempty"`
	Error      string     `json:"error,omitempty"`
	StartedAt  time.Time  `json:"started_at"`
	FinishedAt *time.Time `json:"finished_at,omitempty"`

	OutputDropped int64 `json:"output_dropped,omitempty"` // bytes
}

func (r *record) status() commandStatus {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	status := commandStatus{ID: r.id, Content: r.content, Running: r.finished.IsZero(), StartedAt: r.started.UTC()}
	if !status.Running {
		code, finished := r.exitCode, r.finished.UTC()
		status.ExitCode, status.FinishedAt, status.Error = &code, &finished, r.failure
	}
	if r.output != nil {
		status.OutputDropped = r.output.Dropped()
	}
	return status
}

func (c *Commands) find(id string) (*record, error) {
	if rec := c.records.get(id); rec != nil {
		return rec, nil
	}
	return nil, httpx.NewProblem(http.StatusNotFound, httpx.CodeInvalidBody, "command not found: "+id)
}

func (c *Commands) statusOf(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		rec, err := c.find(id)
		if err != nil {
			httpx.WriteError(w, err)
			return
		}
		httpx.WriteJSON(w, http.StatusOK, rec.status())
	}
}

func (c *Commands) logsOf(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec, err := c.find(id)
		if err != nil {
			httpx.WriteError(w, err)
			return
		}
		if !rec.background {
			httpx.WriteError(w, httpx.BadRequest("not a background command"))
			return
		}
		rec.output.Serve(w, r, rec.running, "EXECD-COMMANDS-TAIL-")
	}
}

// Interrupt ends the command that a request names: its group gets SIGTERM, and SIGKILL after the grace period. The
// answer does not wait for the end.
func (c *Commands) Interrupt(w http.ResponseWriter, r *http.Request) {
	id := r.URL.Query().Get("id")
	if id == "" {
		httpx.WriteError(w, httpx.MissingQuery("id"))
		return
	}
	rec := c.records.get(id)
	if rec == nil {
		httpx.WriteError(w, httpx.RuntimeError(errors.New("no such execution: "+id)))
		return
	}
	rec.mutex.Lock()
	running, now := rec.finished.IsZero(), time.Now()
	repeated := now.Sub(rec.interrupted) < process.InterruptRepeat && !rec.interrupted.IsZero()
	signal := running && now.Sub(rec.interrupted) > process.InterruptGrace
	if signal {
		rec.interrupted = now
	}
	rec.mutex.Unlock()
	if !running && !repeated {
		httpx.WriteError(w, httpx.RuntimeError(errors.New("execution is not running: "+id)))
		return
	}
	if signal {
		go rec.process.Terminate(process.InterruptGrace)
	}
	httpx.WriteEmpty(w)
}

// ForgetAll removes the records of all commands. It returns false, and removes none, while a client's program runs.
func (c *Commands) ForgetAll() bool {
	if c.Slots.InUse() > 0 {
		return false
	}
	c.records.forgetAll()
	return true
}

// EndAll kills the process group of every running command.
func (c *Commands) EndAll() {
	for _, rec := range c.records.all() {
		if rec.process != nil {
			rec.process.SignalGroup(syscall.SIGKILL)
		}
	}
}

// Package terminal serves terminals: making, finding, ending. process.go runs
// the shell behind one, socket.go speaks to its clients.
//
// Invariants
//   - Nothing is started before the first client is there; the first one fixes
//     whether it is a terminal or three pipes.
//   - Terminals are bounded in number. One that was never used, or not for a day,
//     makes room for another.
package terminal

import (
	"errors"
	"net/http"
	"sync"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
)

const (
	terminalLimit   = 64
	terminalDormant = time.Hour // made, but never used
	terminalIdle    = 24 * time.Hour
)

// Terminals is the table of all terminals.
type Terminals struct {
	launcher *process.Launcher
	mutex    sync.Mutex
	byID     map[string]*terminal
}

// New keeps terminals whose shells share everything with plain commands.
func New(launcher *process.Launcher) *Terminals {
	return &Terminals{launcher: launcher, byID: map[string]*terminal{}}
}

// Routes are those of the contract that are answered here.
func (t *Terminals) Routes() []httpx.Route {
	return []httpx.Route{
		{Method: "POST", Path: "/pty", Handler: httpx.Always(t.create)},
		{Method: "GET", Path: "/pty/{}", Handler: t.status},
		{Method: "DELETE", Path: "/pty/{}", Handler: t.deleteTerminal},
		{Method: "GET", Path: "/pty/{}/ws", Handler: t.attach},
	}
}

func (t *Terminals) create(w http.ResponseWriter, r *http.Request) {
	var request struct {
		Cwd     *string `json:"cwd"`
		Command *string `json:"command"`
	}
	err := httpx.DecodeJSON(w, r, httpx.CommandBodyLimit, &request)
	if err != nil && !errors.Is(err, httpx.ErrEmptyBody) {
		httpx.WriteError(w, err)
		return
	}
	made := newTerminal(t.launcher)
	if request.Command != nil {
		made.command = *request.Command
	}
	if request.Cwd != nil && *request.Cwd != "" {
		if made.directory, err = t.launcher.NewDirectory(*request.Cwd); err != nil {
			httpx.WriteError(w, httpx.BadRequest(err.Error()))
			return
		}
	}
	if !t.add(made) {
		w.Header().Set("Retry-After", "1")
		httpx.WriteError(w, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many terminals"))
		return
	}
	httpx.WriteJSON(w, http.StatusCreated, map[string]string{"session_id": made.id})
}

func (t *Terminals) add(made *terminal) bool {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if len(t.byID) >= terminalLimit {
		for id, old := range t.byID {
			if old.abandoned(time.Now()) {
				old.end()
				delete(t.byID, id)
			}
		}
	}
	if len(t.byID) >= terminalLimit {
		return false
	}
	t.byID[made.id] = made
	return true
}

func (t *Terminals) find(id string) (*terminal, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if found := t.byID[id]; found != nil {
		return found, nil
	}
	return nil, httpx.NewProblem(http.StatusNotFound, httpx.CodeContextNotFound, "pty session "+id+" not found")
}

func (t *Terminals) status(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		found, err := t.find(id)
		if err != nil {
			httpx.WriteError(w, err)
			return
		}
		running, offset := found.state()
		httpx.WriteJSON(w, http.StatusOK, map[string]any{"session_id": found.id, "running": running, "output_offset": offset})
	}
}

func (t *Terminals) deleteTerminal(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		found, err := t.find(id)
		if err != nil {
			httpx.WriteError(w, err)
			return
		}
		t.mutex.Lock()
		delete(t.byID, found.id)
		t.mutex.Unlock()
		found.end()
		httpx.WriteEmpty(w)
	}
}

// EndAll removes every terminal.
func (t *Terminals) EndAll() {
	t.mutex.Lock()
	ending := t.byID
	t.byID = map[string]*terminal{}
	t.mutex.Unlock()
	for _, each := range ending {
		each.end()
	}
}

// end kills what runs behind a terminal that is no longer in the table.
func (t *terminal) end() {
	t.mutex.Lock()
	t.removed = true
	t.mutex.Unlock()
	t.changed.Broadcast()
	t.signal(syscall.SIGKILL)
}

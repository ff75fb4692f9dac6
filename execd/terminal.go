package main

// Terminals (contract 12): making, finding, ending. terminal_process.go runs the
// shell behind one, terminal_socket.go speaks to its clients.
//
// Invariants
//   - Nothing is started before the first client is there; the first one fixes
//     whether it is a terminal or three pipes.
//   - Terminals are bounded in number. One that was never used, or not for a day,
//     makes room for another.

import (
	"errors"
	"net/http"
	"sync"
	"syscall"
	"time"
)

const (
	terminalLimit   = 64
	terminalDormant = time.Hour // made, but never used
	terminalIdle    = 24 * time.Hour
)

// Terminals is the table of all terminals.
type Terminals struct {
	launcher *Launcher
	mutex    sync.Mutex
	byID     map[string]*terminal
}

// NewTerminals keeps terminals whose shells share everything with plain commands.
func NewTerminals(launcher *Launcher) *Terminals {
	return &Terminals{launcher: launcher, byID: map[string]*terminal{}}
}

// routes are those of the contract that are answered here.
func (t *Terminals) routes() []routeTo {
	return []routeTo{
		{"POST", "/pty", always(t.create)},
		{"GET", "/pty/{}", t.status},
		{"DELETE", "/pty/{}", t.delete},
		{"GET", "/pty/{}/ws", t.attach},
	}
}

func (t *Terminals) create(w http.ResponseWriter, r *http.Request) {
	var request struct {
		Cwd     *string `json:"cwd"`
		Command *string `json:"command"`
	}
	err := decodeJSON(w, r, commandBodyLimit, &request)
	if err != nil && !errors.Is(err, errEmptyBody) {
		writeError(w, err)
		return
	}
	made := newTerminal(t.launcher)
	if request.Command != nil {
		made.command = *request.Command
	}
	if request.Cwd != nil && *request.Cwd != "" {
		if made.directory, err = t.launcher.newDirectory(*request.Cwd); err != nil {
			writeError(w, badRequest(err.Error()))
			return
		}
	}
	if !t.add(made) {
		w.Header().Set("Retry-After", "1")
		writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many terminals"})
		return
	}
	writeJSON(w, http.StatusCreated, map[string]string{"session_id": made.id})
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
	return nil, &problem{http.StatusNotFound, codeContextNotFound, "pty session " + id + " not found"}
}

func (t *Terminals) status(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		found, err := t.find(id)
		if err != nil {
			writeError(w, err)
			return
		}
		running, offset := found.state()
		writeJSON(w, http.StatusOK, map[string]any{"session_id": found.id, "running": running, "output_offset": offset})
	}
}

func (t *Terminals) delete(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		found, err := t.find(id)
		if err != nil {
			writeError(w, err)
			return
		}
		t.mutex.Lock()
		delete(t.byID, found.id)
		t.mutex.Unlock()
		found.end()
		writeEmpty(w)
	}
}

// endAll removes every terminal.
func (t *Terminals) endAll() {
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

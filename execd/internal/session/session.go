// Package session serves bash sessions: it makes, finds and ends them. run.go runs commands in them, and shell.go keeps
// their state.
//
// Invariants
//   - Runs of one session are sequential; the number of waiting runs is bounded.
//   - The number of sessions and the total size of their states are bounded. If the table is full, sessions that were
//     not used for a day are removed.
//   - When a session ends, its run is killed.
package session

import (
	"errors"
	"maps"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
)

const (
	limit        = 1024
	stateTotal   = 64 << 20
	idleLimit    = 24 * time.Hour
	waitingLimit = 64
	runTime      = 24 * time.Hour
)

// Sessions holds all bash sessions.
type Sessions struct {
	launcher *process.Launcher
	mutex    sync.Mutex
	byID     map[string]*Session
}

// Session is one bash session.
type Session struct {
	id   string
	turn chan struct{} // holds one value while no run is active
	gone chan struct{} // closed by end

	// Guarded by the mutex of Sessions.
	waiting int
	used    time.Time
	ended   bool
	process *process.Process // of the active run
	asked   time.Time        // when it was last interrupted
	kept    int              // bytes of state

	state shellState // only the run that has the turn uses it
}

// New makes an empty table of sessions. Their runs and plain commands share the launcher and its limits.
func New(launcher *process.Launcher) *Sessions {
	return &Sessions{launcher: launcher, byID: map[string]*Session{}}
}

// Routes returns the contract's routes that this package serves.
func (s *Sessions) Routes() []httpx.Route {
	return []httpx.Route{
		{Method: "POST", Path: "/session", Handler: httpx.Always(s.create)},
		{Method: "POST", Path: "/session/{}/run", Handler: s.run},
		{Method: "DELETE", Path: "/session/{}", Handler: s.deleteSession},
	}
}

func (s *Sessions) create(w http.ResponseWriter, r *http.Request) {
	var request struct {
		Cwd *string `json:"cwd"`
	}
	err := httpx.DecodeJSON(w, r, httpx.CommandBodyLimit, &request)
	if err != nil && !errors.Is(err, httpx.ErrEmptyBody) {
		httpx.WriteError(w, err)
		return
	}
	directory := s.launcher.Directory
	if request.Cwd != nil && *request.Cwd != "" {
		if directory, err = s.launcher.NewDirectory(*request.Cwd); err != nil {
			httpx.WriteError(w, httpx.BadRequest(err.Error()))
			return
		}
	}
	made := newSession(directory)
	if !s.add(made) {
		w.Header().Set("Retry-After", "1")
		httpx.WriteError(w, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many sessions"))
		return
	}
	httpx.WriteJSON(w, http.StatusOK, map[string]string{"session_id": made.id})
}

// Adopt makes a session with the caller's id, in the daemon's directory.
func (s *Sessions) Adopt(id string) *Session {
	made := newSession(s.launcher.Directory)
	made.id = id
	s.add(made)
	return made
}

func newSession(directory string) *Session {
	made := &Session{id: httpx.UUID(), turn: make(chan struct{}, 1), gone: make(chan struct{}), used: time.Now()}
	made.state.directory = directory
	made.turn <- struct{}{}
	return made
}

// add registers a session. If the table is full, it first removes the sessions that were unused for idleLimit. It
// returns false if the table is still full.
func (s *Sessions) add(made *Session) bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if len(s.byID) >= limit {
		for id, old := range s.byID {
			if old.process == nil && old.waiting == 0 && time.Since(old.used) > idleLimit {
				old.ended = true
				close(old.gone)
				delete(s.byID, id)
			}
		}
	}
	if len(s.byID) >= limit {
		return false
	}
	s.byID[made.id] = made
	return true
}

func (s *Sessions) find(id string) *Session {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.byID[id]
}

func (s *Sessions) deleteSession(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if !s.end(id) {
			httpx.WriteError(w, httpx.NewProblem(http.StatusNotFound, httpx.CodeContextNotFound, "session "+id+" not found"))
			return
		}
		httpx.WriteEmpty(w)
	}
}

// end removes a session and kills its run. It returns false if there is no such session.
func (s *Sessions) end(id string) bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	ending := s.byID[id]
	if ending == nil {
		return false
	}
	delete(s.byID, id)
	ending.ended = true
	close(ending.gone)
	if ending.process != nil {
		ending.process.SignalGroup(syscall.SIGKILL)
	}
	return true
}

// EndAll removes every session.
func (s *Sessions) EndAll() {
	s.mutex.Lock()
	ids := slices.Collect(maps.Keys(s.byID))
	s.mutex.Unlock()
	for _, id := range ids {
		s.end(id)
	}
}

// Interrupt ends the command that runs in a session; the session stays. It returns false if there is no such session,
// or no command runs and none was interrupted within process.InterruptRepeat.
func (s *Sessions) Interrupt(id string) bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	interrupted := s.byID[id]
	if interrupted == nil {
		return false
	}
	since := time.Since(interrupted.asked)
	if interrupted.process == nil {
		return since < process.InterruptRepeat
	}
	if since > process.InterruptGrace {
		interrupted.asked = time.Now()
		go interrupted.process.Terminate(process.InterruptGrace)
	}
	return true
}

var (
	errTooManyWaiting = httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many runs wait for this session")
)

// Enter waits until it is the turn of this run.
func (s *Sessions) Enter(r *http.Request, entered *Session) error {
	s.mutex.Lock()
	if entered.waiting >= waitingLimit {
		s.mutex.Unlock()
		return errTooManyWaiting
	}
	entered.waiting++
	s.mutex.Unlock()
	var err error
	select {
	case <-entered.turn:
	case <-entered.gone:
		err = httpx.ContextNotFound(entered.id)
	case <-r.Context().Done():
		err = httpx.ErrLeft
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	entered.waiting--
	return err
}

// Leave gives the turn to the next run.
func (s *Sessions) Leave(left *Session) {
	s.mutex.Lock()
	left.process = nil
	left.used = time.Now()
	s.mutex.Unlock()
	left.turn <- struct{}{}
}

// begun registers the process of a run. If the session has ended meanwhile, it kills the process.
func (s *Sessions) begun(running *Session, child *process.Process) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	running.process = child
	if running.ended {
		child.SignalGroup(syscall.SIGKILL)
	}
}

// keep replaces the state of a session, unless the states of all sessions would then exceed stateTotal.
func (s *Sessions) keep(keeping *Session, state shellState) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	total := state.size() - keeping.kept
	for _, other := range s.byID {
		total += other.kept
	}
	if total > stateTotal {
		return errStateSize
	}
	keeping.kept = state.size()
	keeping.state = state
	return nil
}

package main

// Bash sessions (contract 7): making, finding, ending. session_run.go runs
// commands in them, session_shell.go says what they keep.
//
// Invariants
//   - Runs of one session come one after the other; who waits is bounded.
//   - Sessions are bounded in number and in what they keep together; one that was
//     not used for a day makes room for another.
//   - Ending a session kills what runs in it.

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	sessionLimit      = 1024
	sessionStateTotal = 64 << 20
	sessionIdle       = 24 * time.Hour
	sessionWaiting    = 64
	sessionRunTime    = 24 * time.Hour
)

// Sessions is the table of all bash sessions.
type Sessions struct {
	launcher *Launcher
	mutex    sync.Mutex
	byID     map[string]*session
}

type session struct {
	id   string
	turn chan struct{} // holds one value while nobody runs
	gone chan struct{} // closed by end

	// Guarded by the mutex of Sessions.
	waiting int
	used    time.Time
	ended   bool
	process *Process  // of the run under way
	asked   time.Time // when it was last interrupted
	kept    int       // bytes of state

	state shellState // belongs to who has the turn
}

// NewSessions keeps sessions whose runs share everything with plain commands.
func NewSessions(launcher *Launcher) *Sessions {
	return &Sessions{launcher: launcher, byID: map[string]*session{}}
}

// newUUID is a random UUID as text.
func newUUID() string {
	var raw [16]byte
	rand.Read(raw[:])
	raw[6], raw[8] = raw[6]&0x0f|0x40, raw[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", raw[:4], raw[4:6], raw[6:8], raw[8:10], raw[10:])
}

// routes are those of the contract that are answered here.
func (s *Sessions) routes() []routeTo {
	return []routeTo{
		{"POST", "/session", always(s.create)},
		{"POST", "/session/{}/run", s.run},
		{"DELETE", "/session/{}", s.delete},
	}
}

func (s *Sessions) create(w http.ResponseWriter, r *http.Request) {
	var request struct {
		Cwd *string `json:"cwd"`
	}
	err := decodeJSON(w, r, commandBodyLimit, &request)
	if err != nil && !errors.Is(err, errEmptyBody) {
		writeError(w, err)
		return
	}
	directory := s.launcher.directory
	if request.Cwd != nil && *request.Cwd != "" {
		if directory, err = s.launcher.newDirectory(*request.Cwd); err != nil {
			writeError(w, badRequest(err.Error()))
			return
		}
	}
	made := newSession(directory)
	if !s.add(made) {
		w.Header().Set("Retry-After", "1")
		writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many sessions"})
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"session_id": made.id})
}

// adopt makes a session with an id that was chosen elsewhere, in the daemon's directory.
func (s *Sessions) adopt(id string) *session {
	made := newSession(s.launcher.directory)
	made.id = id
	s.add(made)
	return made
}

func newSession(directory string) *session {
	made := &session{id: newUUID(), turn: make(chan struct{}, 1), gone: make(chan struct{}), used: time.Now()}
	made.state.directory = directory
	made.turn <- struct{}{}
	return made
}

// add takes a session up, if need be in the place of one that nobody used for long.
func (s *Sessions) add(made *session) bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if len(s.byID) >= sessionLimit {
		for id, old := range s.byID {
			if old.process == nil && old.waiting == 0 && time.Since(old.used) > sessionIdle {
				old.ended = true
				close(old.gone)
				delete(s.byID, id)
			}
		}
	}
	if len(s.byID) >= sessionLimit {
		return false
	}
	s.byID[made.id] = made
	return true
}

func (s *Sessions) find(id string) *session {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.byID[id]
}

func (s *Sessions) delete(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if !s.end(id) {
			writeError(w, &problem{http.StatusNotFound, codeContextNotFound, "session " + id + " not found"})
			return
		}
		writeEmpty(w)
	}
}

// end removes a session and kills what runs in it.
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

// endAll removes every session.
func (s *Sessions) endAll() {
	s.mutex.Lock()
	ids := slices.Collect(maps.Keys(s.byID))
	s.mutex.Unlock()
	for _, id := range ids {
		s.end(id)
	}
}

// interrupt ends the command that runs in a session; the session stays.
func (s *Sessions) interrupt(id string) bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	interrupted := s.byID[id]
	if interrupted == nil {
		return false
	}
	since := time.Since(interrupted.asked)
	if interrupted.process == nil {
		return since < interruptRepeat
	}
	if since > interruptGrace {
		interrupted.asked = time.Now()
		go interrupted.process.Terminate(interruptGrace)
	}
	return true
}

var (
	errTooManyWaiting = &problem{http.StatusServiceUnavailable, codeUnavailable, "too many runs wait for this session"}
	errLeft           = errors.New("the client left")
)

func contextNotFound(id string) *problem {
	return &problem{http.StatusInternalServerError, codeRuntime, "context not found: " + id}
}

// enter waits until it is this run's turn.
func (s *Sessions) enter(r *http.Request, entered *session) error {
	s.mutex.Lock()
	if entered.waiting >= sessionWaiting {
		s.mutex.Unlock()
		return errTooManyWaiting
	}
	entered.waiting++
	s.mutex.Unlock()
	var err error
	select {
	case <-entered.turn:
	case <-entered.gone:
		err = contextNotFound(entered.id)
	case <-r.Context().Done():
		err = errLeft
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	entered.waiting--
	return err
}

// leave gives the turn to the next run.
func (s *Sessions) leave(left *session) {
	s.mutex.Lock()
	left.process = nil
	left.used = time.Now()
	s.mutex.Unlock()
	left.turn <- struct{}{}
}

// begun notes the process of a run; a session that ended meanwhile kills it.
func (s *Sessions) begun(running *session, process *Process) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	running.process = process
	if running.ended {
		process.SignalGroup(syscall.SIGKILL)
	}
}

// keep replaces the state of a session, if all sessions together may keep that much.
func (s *Sessions) keep(keeping *session, state shellState) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	total := state.size() - keeping.kept
	for _, other := range s.byID {
		total += other.kept
	}
	if total > sessionStateTotal {
		return errStateSize
	}
	keeping.kept = state.size()
	keeping.state = state
	return nil
}

// stateFile is a file in memory with a content, at its beginning.
func stateFile(content []byte) (*os.File, error) {
	file, err := memoryFile()
	if err != nil {
		return nil, err
	}
	if _, err = file.Write(content); err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// readBounded reads a file from its beginning; one that is larger than limit is an error.
func readBounded(file *os.File, limit int64) ([]byte, error) {
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > limit {
		return nil, errors.New("the file is too large")
	}
	return io.ReadAll(io.NewSectionReader(file, 0, limit))
}

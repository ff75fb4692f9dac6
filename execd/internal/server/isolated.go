package server

// The parts of an isolated session that run inside its view: a bash session, and files.

import (
	"io"
	"log"
	"net/http"
	"os"
	"syscall"

	"sallyport.dev/execd/internal/account"
	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/files"
	"sallyport.dev/execd/internal/isolate"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/session"
	"sallyport.dev/execd/internal/sys"
)

// IsolatedParts makes the bash session and the file handlers of an isolated session.
func IsolatedParts(place isolate.Place) (isolate.Shell, isolate.Files) {
	env, accounts := environ.Fixed(place.Env), func() account.Accounts { return account.Load("") }
	launcher := &process.Launcher{
		Reaper: process.NewReaper(), Env: env, Accounts: accounts, Directory: place.Directory, Tail: process.DefaultTail,
		Slots: process.NewSlots(place.Running), Leftovers: process.NewLeftovers(), Log: log.New(io.Discard, "", 0),
	}
	sessions := session.New(launcher)
	return insideShell{sessions, sessions.Adopt(place.ID)}, files.New(env, accounts, place.Directory, sys.CurrentUmask())
}

// insideShell is the bash session of an isolated session.
type insideShell struct {
	sessions *session.Sessions
	session  *session.Session
}

// Enter waits until it is the turn of a run.
func (s insideShell) Enter(r *http.Request) error { return s.sessions.Enter(r, s.session) }

// Leave gives the turn to the next run.
func (s insideShell) Leave() { s.sessions.Leave(s.session) }

// Serve executes a run and sends its events.
func (s insideShell) Serve(w http.ResponseWriter, r *http.Request, run *isolate.Task) {
	s.sessions.Serve(w, r, s.session, specOf(run))
}

// Detach starts a run in the background.
func (s insideShell) Detach(run *isolate.Task) (child *process.Process, output *os.File, ended func(), err error) {
	return s.sessions.Detach(s.session, specOf(run))
}

// specOf converts a run of an isolated session into a run of a bash session. At its time limit the run first gets
// SIGINT.
func specOf(run *isolate.Task) *session.Run {
	return &session.Run{
		Command: run.Code, Limit: run.Limit, Envs: run.Envs, ID: run.ID, Asking: syscall.SIGINT, Failure: isolate.Failure,
	}
}

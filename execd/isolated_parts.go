package main

// What an isolated session is made of, inside its view: a bash session, and files.

import (
	"io"
	"log"
	"net/http"
	"os"
	"syscall"
)

// PartsInside makes them.
func PartsInside(place isolatedPlace) (isolatedShell, isolatedFiles) {
	env, accounts := FixedEnvironment(place.env), func() Accounts { return LoadAccounts("") }
	launcher := &Launcher{
		reaper: NewReaper(), env: env, accounts: accounts, directory: place.directory, tail: defaultTail,
		slots: NewSlots(place.running), leftovers: newLeftovers(), log: log.New(io.Discard, "", 0),
	}
	sessions := NewSessions(launcher)
	return insideShell{sessions, sessions.adopt(place.id)}, NewFiles(env, accounts, place.directory, currentUmask())
}

// insideShell is a bash session as that of an isolated session.
type insideShell struct {
	sessions *Sessions
	session  *session
}

func (s insideShell) enter(r *http.Request) error { return s.sessions.enter(r, s.session) }
func (s insideShell) leave()                      { s.sessions.leave(s.session) }

func (s insideShell) serve(w http.ResponseWriter, r *http.Request, run *isolatedRun) {
	s.sessions.serve(w, r, s.session, specOf(run))
}

func (s insideShell) detach(run *isolatedRun) (process *Process, output *os.File, ended func(), err error) {
	return s.sessions.detach(s.session, specOf(run))
}

// specOf is a run of an isolated session as one of a session: at its time limit it is interrupted.
func specOf(run *isolatedRun) *runSpec {
	return &runSpec{
		command: run.code, limit: run.limit, envs: run.envs, id: run.id, asking: syscall.SIGINT, failure: isolatedFailure,
	}
}

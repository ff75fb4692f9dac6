package main

// Ending what earlier callers left, for an init that does not preserve runtime state.
//
// Invariants
//   - No request is admitted meanwhile, so nothing new begins once the former ones are over.
//   - It takes a bounded time; what is left then is an error.
//   - The entrypoint is left alone, and so are files other than the EXECD_ENVS file and
//     processes that commands detached from their group.

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"
)

const (
	stateEnding = 30 * time.Second
	stateLook   = 10 * time.Millisecond
)

// connectionKey is the key of a request's context for its connection.
type connectionKey struct{}

func withConnection(ctx context.Context, connection net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, connection)
}

var errStateLeft = runtimeError(errors.New("what the former owner left did not end in time"))

// endState ends everything; the connection of the request is left open.
func (s *Server) endState(r *http.Request) error {
	limit := s.endLimit
	if limit == 0 {
		limit = stateEnding
	}
	ctx, stop := context.WithTimeout(context.Background(), limit)
	defer stop()
	own, _ := r.Context().Value(connectionKey{}).(*boundedConn)
	s.connections.closeOthers(own)
	ended := make(chan error, 1)
	go func() { ended <- s.endEach(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return errStateLeft
	}
}

func (s *Server) endEach(ctx context.Context) error {
	s.hooks.end()
	for {
		former := s.binding.requests.Load() // a request that was over by now began nothing later
		s.sessions.endAll()
		s.terminals.endAll()
		s.isolation.endAll()
		s.commands.endAll()
		if former == 0 && s.commands.records.forgetAll() && s.hooks.ended() {
			break
		}
		select {
		case <-ctx.Done():
			return errStateLeft
		case <-time.After(stateLook):
		}
	}
	if err := s.code.endAll(ctx); err != nil {
		return runtimeError(errors.New("code contexts of the former owner could not be ended"))
	}
	s.identities.endAll()
	s.proxy.services.CloseIdleConnections()
	return s.commands.env.restoreFile()
}

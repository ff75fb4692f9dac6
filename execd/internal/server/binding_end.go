package server

// Ending the state of earlier callers, for an init that does not preserve runtime state.
//
// Invariants
//   - No request is admitted meanwhile, so nothing new begins after the former requests have ended.
//   - It takes a bounded time. If anything is left after that time, the init fails.
//   - It does not end the entrypoint or processes that commands detached from their group, and it changes no file
//     except the EXECD_ENVS file.

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"sallyport.dev/execd/internal/httpx"
)

const (
	stateEnding = 30 * time.Second
	stateLook   = 10 * time.Millisecond
)

// connectionKey is the key of the connection in a request's context.
type connectionKey struct{}

// withConnection returns the context for the requests of a connection.
func withConnection(ctx context.Context, connection net.Conn) context.Context {
	if bounded, ok := connection.(*boundedConn); ok {
		ctx = httpx.WithBodyLimit(ctx, bounded.bodyLimit)
	}
	return context.WithValue(ctx, connectionKey{}, connection)
}

// notEnded returns the error of an init that could not end something in time.
func notEnded(what string) *httpx.Problem {
	return httpx.RuntimeError(errors.New(what + " of the former owner did not end in time"))
}

// endState ends the state of earlier callers within the limit. The connection of the request stays open.
func (s *Server) endState(r *http.Request) error {
	ctx, stop := context.WithTimeout(context.Background(), s.endLimit)
	defer stop()
	own, _ := r.Context().Value(connectionKey{}).(*boundedConn)
	s.connections.closeOthers(own)
	var under atomic.Value // name of the part that is being ended, for the error message
	under.Store("")
	ended := make(chan error, 1)
	go func() { ended <- s.endEach(ctx, &under) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return notEnded(under.Load().(string))
	}
}

// endEach ends each part of the state, and stores in under the name of the part that it waits for.
func (s *Server) endEach(ctx context.Context, under *atomic.Value) error {
	s.hooks.End()
	for {
		former := s.binding.requests.Load() // read first, because a request can start parts until it ends
		for _, each := range [...]struct {
			what string
			end  func()
		}{
			{"isolated sessions", s.isolation.EndAll}, {"sessions", s.sessions.EndAll}, {"terminals", s.terminals.EndAll},
			{"commands", s.commands.EndAll}, {"runs of code", s.code.StopAll},
		} {
			under.Store(each.what)
			each.end()
		}
		switch {
		case former > 0:
			under.Store("requests")
		case !s.commands.ForgetAll():
			under.Store("commands")
		case !s.hooks.Ended():
			under.Store("periodic hooks")
		default:
			return s.endRest(ctx, under)
		}
		select {
		case <-ctx.Done():
			return notEnded(under.Load().(string))
		case <-time.After(stateLook):
		}
	}
}

// endRest ends the parts that need no request: code contexts, helpers, idle proxy connections, the EXECD_ENVS file.
func (s *Server) endRest(ctx context.Context, under *atomic.Value) error {
	under.Store("code contexts")
	if err := s.code.EndAll(ctx); err != nil {
		s.log.Printf("init: %v", err)
		return notEnded("code contexts")
	}
	under.Store("helpers")
	s.identities.EndAll()
	s.proxy.services.CloseIdleConnections()
	return s.env.RestoreFile()
}

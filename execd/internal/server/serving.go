package server

// The listener of the API.
//
// Invariants
//   - If a listener fails, the daemon listens again; existing connections stay open.
//   - The attempts are bounded. After the last one the daemon ends, and with it the sandbox. A sandbox that cannot be
//     reached must not look as if it worked, and another program can have taken the port.

import (
	"errors"
	"fmt"
	"log"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// API serves at an address until it is closed.
type API struct {
	server  *Server
	address string
	log     *log.Logger

	attempts  int           // limit of consecutive attempts to serve again
	pause     time.Duration // before the second attempt; doubles with each attempt
	pauseMost time.Duration
	steady    time.Duration // an attempt that serves for this long resets the count of failures

	mutex    sync.Mutex
	listener net.Listener // nil if no listener is open
	closed   chan struct{}
}

// NewAPI makes an API for a port on all IPv4 interfaces. It does not listen yet.
func NewAPI(server *Server, port int, logger *log.Logger) *API {
	return &API{
		server: server, address: ":" + strconv.Itoa(port), log: logger,
		attempts: 8, pause: 100 * time.Millisecond, pauseMost: 2 * time.Second, steady: 10 * time.Second,
		closed: make(chan struct{}),
	}
}

// Open listens. If the port is in use, it tries again for 3 s: the port is in the kernel's ephemeral range, so an
// outgoing connection of the image can use it for a short time.
func (a *API) Open() error {
	for deadline := time.Now().Add(3 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		_, err := a.current()
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			return err
		}
	}
}

// listen makes a listener; the caller holds the mutex.
func (a *API) listen() (net.Listener, error) {
	if a.isClosed() {
		return nil, net.ErrClosed
	}
	listener, err := net.Listen("tcp4", a.address)
	if err != nil {
		return nil, err
	}
	a.listener = listener
	return listener, nil
}

// Serve serves on the listener that Open has opened. It returns nil after Close, and an error after the last attempt
// has failed.
func (a *API) Serve() error {
	failures := 0
	for {
		began := time.Now()
		err := a.serveOnce()
		if a.isClosed() {
			return nil
		}
		if time.Since(began) >= a.steady {
			failures = 0
		}
		if failures == a.attempts {
			return fmt.Errorf("after %d attempts: %w", failures, err)
		}
		a.log.Printf("serving ended: %v; listening again", err)
		if !a.wait(failures) {
			return nil
		}
		failures++
	}
}

// serveOnce serves until the listener fails. It opens a new listener if there is none.
func (a *API) serveOnce() error {
	listener, err := a.current()
	if err != nil {
		return err
	}
	defer a.forget()
	return a.server.Serve(listener)
}

func (a *API) current() (net.Listener, error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.listener != nil {
		return a.listener, nil
	}
	return a.listen()
}

func (a *API) forget() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.listener = nil
}

// wait pauses for a time that grows with the number of failures. It returns false if the API was closed.
func (a *API) wait(failures int) bool {
	if failures == 0 {
		return true
	}
	timer := time.NewTimer(min(a.pause<<(failures-1), a.pauseMost))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-a.closed:
		return false
	}
}

// Close closes the listener; existing connections stay open.
func (a *API) Close() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.isClosed() {
		return
	}
	close(a.closed)
	if a.listener != nil {
		a.listener.Close()
	}
}

func (a *API) isClosed() bool {
	select {
	case <-a.closed:
		return true
	default:
		return false
	}
}

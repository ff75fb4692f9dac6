package server

// The address of the API.
//
// Invariants
//   - Where a listener breaks the daemon listens again; connections from before go on.
//   - The attempts are bounded. When they are used up the daemon ends, and with it the
//     sandbox: one that cannot be reached any more must not look as if it worked, and the
//     port may belong to another program by then.

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

	attempts  int           // to serve again, one after the other
	pause     time.Duration // before the second attempt; doubles with each one
	pauseMost time.Duration
	steady    time.Duration // serving this long makes an attempt a success

	mutex    sync.Mutex
	listener net.Listener // nil while there is none
	closed   chan struct{}
}

// NewAPI listens on a port, all IPv4 interfaces.
func NewAPI(server *Server, port int, logger *log.Logger) *API {
	return &API{
		server: server, address: ":" + strconv.Itoa(port), log: logger,
		attempts: 8, pause: 100 * time.Millisecond, pauseMost: 2 * time.Second, steady: 10 * time.Second,
		closed: make(chan struct{}),
	}
}

// Open listens. It waits a little for a port that an outgoing connection of the image
// happens to use: ours lies in the kernel's ephemeral range.
func (a *API) Open() error {
	for deadline := time.Now().Add(3 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		_, err := a.current()
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			return err
		}
	}
}

// listen makes a listener; mutex held.
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

// Serve serves what Open has opened. It returns nil after Close, and an error when the API
// cannot be served any more.
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

// serveOnce serves until the listener breaks, with a new one if the last one has.
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

// wait lets the time pass that belongs to a number of failures; false if the API was closed.
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

// Close ends listening; connections go on.
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

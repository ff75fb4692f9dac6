package server

// The connections to the daemon: limits of their number and of their times.
//
// Invariants
//   - The number of connections of all listeners together is bounded; further connections stay in the kernel's queue.
//     A process in the sandbox can hold connections open without a token. So connections from inside the sandbox have
//     a lower bound, and there is always room for connections through the gateway.
//   - Header size, header time, idle time and the wait for a client that does not read are bounded.
//   - A temporary error of accept does not end serving; an error of the listener does.

import (
	"errors"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/httpx"
)

const (
	connectionLimit = 1024
	insideLimit     = connectionLimit * 3 / 4 // connections from inside the sandbox
	sendfilePiece   = 256 << 10
)

// Connections bounds the connections of all listeners of a server.
type Connections struct {
	headerLimit time.Duration // for a request's header
	idleLimit   time.Duration // between two requests
	bodyLimit   time.Duration // for one read of a request's body
	answerLimit time.Duration // how long a write waits for the client to read
	inside      func(net.Conn) bool

	slots chan struct{}
	mutex sync.Mutex
	open  map[*boundedConn]Auth // open connections, each with the launch in which it began
	own   int                   // number of open connections from inside the sandbox
}

// NewConnections makes a Connections with the limits of a daemon.
func NewConnections() *Connections {
	return &Connections{
		headerLimit: 15 * time.Second, idleLimit: 10 * time.Minute,
		bodyLimit: httpx.DefaultBodyLimit, answerLimit: 2 * time.Minute, inside: fromInside,
		slots: make(chan struct{}, connectionLimit), open: map[*boundedConn]Auth{},
	}
}

// server makes an HTTP server with the limits of these connections.
func (c *Connections) server(handler http.Handler, logger *log.Logger) *http.Server {
	return &http.Server{
		Handler:                      handler,
		ReadHeaderTimeout:            c.headerLimit,
		IdleTimeout:                  c.idleLimit,
		MaxHeaderBytes:               httpx.HeaderBytesLimit,
		ErrorLog:                     logger,
		DisableGeneralOptionsHandler: true,
	}
}

// closeFormer closes the connections that began in another launch. Connections from inside the sandbox stay open over a
// restore.
func (c *Connections) closeFormer(now Auth) {
	c.mutex.Lock()
	var former []*boundedConn
	for connection, launch := range c.open {
		if launch != now {
			former = append(former, connection)
		}
	}
	c.mutex.Unlock()
	for _, connection := range former {
		connection.Close()
	}
}

// closeOthers closes every connection but one.
func (c *Connections) closeOthers(own *boundedConn) {
	c.mutex.Lock()
	others := slices.DeleteFunc(slices.Collect(maps.Keys(c.open)), func(each *boundedConn) bool { return each == own })
	c.mutex.Unlock()
	for _, connection := range others {
		connection.Close()
	}
}

// admit counts a connection, for which the caller has taken a place in slots. It returns nil if there are too many
// connections from inside the sandbox.
func (c *Connections) admit(tcp *net.TCPConn, launch Auth) *boundedConn {
	inside := 0
	if c.inside(tcp) {
		inside = 1
	}
	admitted := &boundedConn{TCPConn: tcp, bodyLimit: c.bodyLimit, answerLimit: c.answerLimit}
	admitted.release = sync.OnceFunc(func() {
		c.mutex.Lock()
		delete(c.open, admitted)
		c.own -= inside
		c.mutex.Unlock()
		<-c.slots
	})
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.own+inside > insideLimit {
		return nil
	}
	c.own += inside
	c.open[admitted] = launch
	return admitted
}

// fromInside reports whether a connection comes from inside the sandbox. An unknown address counts as inside.
func fromInside(connection net.Conn) bool {
	from, ok := connection.RemoteAddr().(*net.TCPAddr)
	to, known := connection.LocalAddr().(*net.TCPAddr)
	return !ok || !known || from.IP.IsLoopback() || from.IP.Equal(to.IP)
}

// boundedListener is a listener whose connections are counted and bounded.
type boundedListener struct {
	net.Listener
	connections *Connections
	launch      func() (Auth, error)
}

func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		accepted, err := l.accept()
		if err != nil {
			return nil, err
		}
		if accepted != nil {
			return accepted, nil
		}
	}
}

// accept returns neither a connection nor an error if it has refused a connection.
func (l *boundedListener) accept() (*boundedConn, error) {
	c := l.connections
	c.slots <- struct{}{}
	connection, err := l.Listener.Accept()
	if err != nil {
		<-c.slots
		return nil, acceptError(err)
	}
	tcp, ok := connection.(*net.TCPConn)
	if !ok {
		<-c.slots
		connection.Close()
		return nil, errors.New("not a TCP connection")
	}
	launch, _ := l.launch() // if the launch is unknown, all requests of the connection are refused
	admitted := c.admit(tcp, launch)
	if admitted == nil {
		<-c.slots
		tcp.Close()
	}
	return admitted, nil
}

// passingErrors are errors of accept after which the listener still works (accept(2)): a limit is reached, or the
// connection ended before it was accepted.
var passingErrors = []error{
	syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.ENOSPC, syscall.EPERM,
	syscall.ECONNABORTED, syscall.ECONNRESET, syscall.ETIMEDOUT, syscall.EPROTO, syscall.ENOPROTOOPT, syscall.EOPNOTSUPP,
	syscall.ENETDOWN, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.EHOSTUNREACH, syscall.ENONET,
}

// acceptError marks a temporary error, so that net/http waits and accepts again.
func acceptError(err error) error {
	passes := slices.ContainsFunc(passingErrors, func(passing error) bool { return errors.Is(err, passing) })
	if !passes {
		return err
	}
	return passingError{err}
}

// passingError is a temporary net.Error: net/http accepts again after it.
type passingError struct{ error }

func (passingError) Timeout() bool { return false }

func (passingError) Temporary() bool { return true }

// boundedConn is a connection whose writes fail if the client does not read for longer than answerLimit.
type boundedConn struct {
	*net.TCPConn
	bodyLimit   time.Duration // for one read of a request's body
	answerLimit time.Duration
	release     func()
}

func (c *boundedConn) Write(data []byte) (int, error) {
	_ = c.SetWriteDeadline(time.Now().Add(c.answerLimit))
	return c.TCPConn.Write(data)
}

// ReadFrom sends a file with sendfile(2), in pieces; each piece has its own time limit. Any other source is copied
// through Write, because the source can be slower than the client and that time must not count.
func (c *boundedConn) ReadFrom(source io.Reader) (int64, error) {
	file, ok := source.(*io.LimitedReader)
	if ok {
		_, ok = file.R.(*os.File)
	}
	if !ok {
		return io.Copy(struct{ io.Writer }{c}, source)
	}
	var sent int64
	for file.N > 0 {
		size := min(file.N, sendfilePiece)
		_ = c.SetWriteDeadline(time.Now().Add(c.answerLimit))
		n, err := c.TCPConn.ReadFrom(io.LimitReader(file.R, size))
		sent += n
		file.N -= n
		if err != nil || n < size {
			return sent, err
		}
	}
	return sent, nil
}

func (c *boundedConn) Close() error {
	defer c.release()
	return c.TCPConn.Close()
}

package server

// The connections to the daemon: their number, and how long one may wait.
//
// Invariants
//   - The number is bounded, whichever listener they came through; connections beyond it stay
//     in the kernel's queue. Connections from inside the sandbox, which need no token to be
//     held open, have a lower bound: there is always room for those through the gateway.
//   - Header size, header time, idle time and the waiting for a client that does not read are
//     bounded.
//   - An error of accept that passes does not end serving; an error of the listener does.

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
	insideLimit     = connectionLimit * 3 / 4 // of those, from inside the sandbox
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
	open  map[*boundedConn]Auth // and in which launch each began
	own   int                   // of them from inside
}

// NewConnections has the limits of a daemon.
func NewConnections() *Connections {
	return &Connections{
		headerLimit: 15 * time.Second, idleLimit: 10 * time.Minute,
		bodyLimit: httpx.DefaultBodyLimit, answerLimit: 2 * time.Minute, inside: fromInside,
		slots: make(chan struct{}, connectionLimit), open: map[*boundedConn]Auth{},
	}
}

// server is an HTTP server with the limits of these connections.
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

// closeFormer closes the connections that began in another launch: from inside the
// sandbox they outlive a restore.
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

// admit counts a connection, which holds a slot; nil where it is one too many from inside.
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

// fromInside reports whether a connection comes from this machine.
func fromInside(connection net.Conn) bool {
	from, ok := connection.RemoteAddr().(*net.TCPAddr)
	to, known := connection.LocalAddr().(*net.TCPAddr)
	return !ok || !known || from.IP.IsLoopback() || from.IP.Equal(to.IP)
}

// boundedListener gives connections that are counted.
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

// accept returns neither a connection nor an error when it has refused one.
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
	launch, _ := l.launch() // if that is not known, its requests are refused
	admitted := c.admit(tcp, launch)
	if admitted == nil {
		<-c.slots
		tcp.Close()
	}
	return admitted, nil
}

// passingErrors are errors of accept after which the listener still works (accept(2)): a limit
// is reached, or what came was gone before it could be taken.
var passingErrors = []error{
	syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.ENOSPC, syscall.EPERM,
	syscall.ECONNABORTED, syscall.ECONNRESET, syscall.ETIMEDOUT, syscall.EPROTO, syscall.ENOPROTOOPT, syscall.EOPNOTSUPP,
	syscall.ENETDOWN, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.EHOSTUNREACH, syscall.ENONET,
}

// acceptError marks an error that passes: net/http then waits, and accepts again.
func acceptError(err error) error {
	passes := slices.ContainsFunc(passingErrors, func(passing error) bool { return errors.Is(err, passing) })
	if !passes {
		return err
	}
	return passingError{err}
}

// passingError is a net.Error after which net/http accepts again.
type passingError struct{ error }

func (passingError) Timeout() bool { return false }

func (passingError) Temporary() bool { return true }

// boundedConn is closed when its client does not read for too long.
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

// ReadFrom lets the kernel send a file, piece by piece: each has its own time. Any other
// source may be slower than a client, and is copied.
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

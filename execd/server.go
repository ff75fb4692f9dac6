package main

// The HTTP surface: listener limits, authentication, routing (contract 2, 3).
//
// Invariants
//   - Only /ping and /ready are served without the token; binding.go says who may init.
//   - Unknown path or method: 404; never a redirect.
//   - After a restore nobody is served, on old connections or new ones, before an init.
//   - Connections, header size, header time, the waiting for a body, for a client that does
//     not read and idle time are bounded.
//   - /proxy/<own port>/… is the request itself, however often it is nested.

import (
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	connectionLimit   = 1024
	insideLimit       = connectionLimit * 3 / 4 // of those, from inside the sandbox
	headerBytesLimit  = 64 << 10
	concurrentWalks   = 8
	defaultPort       = 44772
	defaultMaxRunning = 512
	sendfilePiece     = 256 << 10
)

var ( // tests shorten them
	headerTimeLimit = 15 * time.Second
	idleTimeLimit   = 10 * time.Minute
	answerIdleLimit = 2 * time.Minute // how long a write waits for a client to read
)

// Server answers requests.
type Server struct {
	binding    *Binding
	hooks      *Hooks
	restart    func() // of the entrypoint; nil where there is none
	port       int
	commands   *Commands
	sessions   *Sessions
	terminals  *Terminals
	code       *CodeContexts
	files      *Files
	identities *Identities
	isolation  *Isolation
	metrics    *Metrics
	proxy      http.Handler
	log        *log.Logger

	listener *boundedListener // set by Serve
}

// Serve accepts connections until the listener is closed.
func (s *Server) Serve(listener net.Listener) error {
	server := &http.Server{
		Handler:                      s,
		ReadHeaderTimeout:            headerTimeLimit,
		IdleTimeout:                  idleTimeLimit,
		MaxHeaderBytes:               headerBytesLimit,
		ErrorLog:                     s.log,
		DisableGeneralOptionsHandler: true,
	}
	s.listener = &boundedListener{
		Listener: listener, slots: make(chan struct{}, connectionLimit), now: s.binding.now, open: map[*boundedConn]Auth{},
		inside: fromInside,
	}
	return server.Serve(s.listener)
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	boundBody(w, r)
	raw := s.withoutOwnProxy(rawPath(r))
	path, err := url.PathUnescape(raw)
	if err != nil {
		writeError(w, badRequest("invalid path"))
		return
	}
	if r.Method == http.MethodGet && path == "/ping" {
		writeEmpty(w)
		return
	}
	restored, err := s.binding.look()
	if restored {
		s.log.Print("restored from a checkpoint: nobody is served before an init")
		s.listener.closeFormer()
	}
	switch {
	case err != nil:
		writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, err.Error()})
		return
	case r.Method == http.MethodGet && path == "/ready":
		s.binding.serveReady(w, r)
		return
	case r.Method == http.MethodPost && path == "/internal/init" && s.binding.offers():
		s.initialise(w, r)
		return
	case s.binding.waits():
		writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, "not initialised"})
		return
	}
	if !s.binding.Allows(r) {
		writeError(w, unauthorized)
		return
	}
	if rest, ok := strings.CutPrefix(raw, "/proxy"); ok && (rest == "" || rest[0] == '/') {
		s.serveProxy(w, r, rest)
		return
	}
	if rest, ok := strings.CutPrefix(path, identityPrefix); ok && s.serveAs(w, r, rest) {
		return
	}
	if path != "/" {
		path = strings.TrimSuffix(path, "/")
		raw = strings.TrimSuffix(raw, "/")
	}
	if handler := s.route(r.Method, path, raw); handler != nil {
		handler(w, r)
		return
	}
	notFound(w)
}

func (s *Server) route(method, path, raw string) http.HandlerFunc {
	switch method + " " + path {
	case "POST /command":
		return s.commands.run
	case "DELETE /command", "DELETE /code":
		return s.interrupt
	case "POST /code":
		return s.code.run
	case "POST /code/context":
		return s.code.create
	case "GET /code/contexts":
		return s.code.list
	case "DELETE /code/contexts":
		return s.code.deleteAll
	case "POST /pty":
		return s.terminals.create
	case "POST /session":
		return s.sessions.create
	case "GET /metrics":
		return s.metrics.serve
	case "GET /metrics/watch":
		return s.metrics.watch
	}
	if handler := s.files.route(method, path); handler != nil {
		return handler
	}
	if rest, ok := strings.CutPrefix(path, isolatedPrefix); ok {
		return s.isolation.route(method, rest)
	}
	return s.routeWithID(method, strings.Split(raw, "/")[1:])
}

// routeWithID finds the handlers whose path has an id, which is decoded once.
func (s *Server) routeWithID(method string, raw []string) http.HandlerFunc {
	switch {
	case method == http.MethodGet && len(raw) == 3 && raw[0] == "command" && raw[1] == "status":
		return s.commands.statusOf(raw[2])
	case method == http.MethodGet && len(raw) == 3 && raw[0] == "command" && raw[2] == "logs":
		return s.commands.logsOf(raw[1])
	case method == http.MethodGet && len(raw) == 3 && raw[0] == "code" && raw[1] == "contexts":
		return s.code.get(raw[2])
	case method == http.MethodDelete && len(raw) == 3 && raw[0] == "code" && raw[1] == "contexts":
		return s.code.delete(raw[2])
	case method == http.MethodGet && len(raw) == 2 && raw[0] == "pty":
		return s.terminals.status(raw[1])
	case method == http.MethodDelete && len(raw) == 2 && raw[0] == "pty":
		return s.terminals.delete(raw[1])
	case method == http.MethodGet && len(raw) == 3 && raw[0] == "pty" && raw[2] == "ws":
		return s.terminals.attach(raw[1])
	case method == http.MethodPost && len(raw) == 3 && raw[0] == "session" && raw[2] == "run":
		return s.sessions.run(raw[1])
	case method == http.MethodDelete && len(raw) == 2 && raw[0] == "session":
		return s.sessions.delete(raw[1])
	}
	return nil
}

const identityPrefix = "/v1/filesystem"

// serveAs answers the file routes with an identity; false where there is no such route.
func (s *Server) serveAs(w http.ResponseWriter, r *http.Request, rest string) bool {
	chosen, route, ok, err := splitIdentity(strings.TrimSuffix(rest, "/"))
	if !ok || s.files.route(r.Method, route) == nil {
		return false
	}
	if err != nil {
		writeError(w, err)
		return true
	}
	s.identities.serve(w, r, chosen, route)
	return true
}

// interrupt ends what runs under an id: a session's, a code context's or a command's.
func (s *Server) interrupt(w http.ResponseWriter, r *http.Request) {
	if s.sessions.interrupt(r.URL.Query().Get("id")) {
		writeEmpty(w)
		return
	}
	if s.code.interrupt(w, r) {
		return
	}
	s.commands.interrupt(w, r)
}

// rawPath is the path as it was sent.
func rawPath(r *http.Request) string {
	if strings.HasPrefix(r.RequestURI, "/") {
		raw, _, _ := strings.Cut(r.RequestURI, "?")
		return raw
	}
	return r.URL.EscapedPath()
}

// withoutOwnProxy strips every leading /proxy/<own port>.
func (s *Server) withoutOwnProxy(raw string) string {
	own := "/proxy/" + strconv.Itoa(s.port)
	for {
		rest, ok := strings.CutPrefix(raw, own)
		switch {
		case ok && rest == "":
			return "/"
		case ok && rest[0] == '/':
			raw = rest
		default:
			return raw
		}
	}
}

// boundedListener leaves connections beyond the limit in the kernel's queue. Those from
// inside, which anybody there can hold open without a token, end beyond a limit of their own:
// there is always room for who comes through the gateway.
type boundedListener struct {
	net.Listener
	slots  chan struct{}
	now    func() (Auth, error)
	inside func(net.Conn) bool

	mutex sync.Mutex
	open  map[*boundedConn]Auth // and in which launch each began
	own   int                   // of them from inside
}

// fromInside reports whether a connection comes from this machine; tests have another idea.
var fromInside = func(connection net.Conn) bool {
	from, ok := connection.RemoteAddr().(*net.TCPAddr)
	to, known := connection.LocalAddr().(*net.TCPAddr)
	return !ok || !known || from.IP.IsLoopback() || from.IP.Equal(to.IP)
}

func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		made, err := l.accept()
		if made != nil || err != nil {
			return made, err
		}
	}
}

// accept returns neither a connection nor an error when it has refused one.
func (l *boundedListener) accept() (net.Conn, error) {
	l.slots <- struct{}{}
	connection, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	tcp, ok := connection.(*net.TCPConn)
	if !ok {
		<-l.slots
		connection.Close()
		return nil, net.ErrClosed
	}
	made, inside := &boundedConn{TCPConn: tcp}, 0
	if l.inside(tcp) {
		inside = 1
	}
	made.release = sync.OnceFunc(func() {
		l.mutex.Lock()
		delete(l.open, made)
		l.own -= inside
		l.mutex.Unlock()
		<-l.slots
	})
	launch, _ := l.now() // if that is not known, its requests are refused
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.own+inside > insideLimit {
		<-l.slots
		tcp.Close()
		return nil, nil
	}
	l.own += inside
	l.open[made] = launch
	return made, nil
}

// closeFormer closes the connections that began in another launch: from inside the
// sandbox they outlive a restore.
func (l *boundedListener) closeFormer() {
	now, _ := l.now()
	l.mutex.Lock()
	var former []*boundedConn
	for connection, launch := range l.open {
		if launch != now {
			former = append(former, connection)
		}
	}
	l.mutex.Unlock()
	for _, connection := range former {
		connection.Close()
	}
}

// boundedConn is closed to whoever does not read for too long.
type boundedConn struct {
	*net.TCPConn
	release func()
}

func (c *boundedConn) Write(data []byte) (int, error) {
	_ = c.SetWriteDeadline(time.Now().Add(answerIdleLimit))
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
		_ = c.SetWriteDeadline(time.Now().Add(answerIdleLimit))
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

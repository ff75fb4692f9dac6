package main

// The HTTP surface: authentication, and what is served to whom (contract 2, 3).
// connections.go bounds connections, routes.go has the routes.
//
// Invariants
//   - Only /ping and /ready are served without the token; binding.go says who may init.
//   - Unknown path or method: 404; never a redirect.
//   - After a restore nobody is served, on old connections or new ones, before an init.
//   - /proxy/<own port>/… is the request itself, however often it is nested.

import (
	"log"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	defaultPort       = 44772
	defaultMaxRunning = 512
)

// Options say what a Server serves, and to whom.
type Options struct {
	Port          int
	Binding       *Binding
	Hooks         *Hooks
	Launcher      *Launcher
	Umask         os.FileMode // of files without a mode of their own
	Program       *Program    // ourselves, to start helpers; nil where there are none
	IsolationRoot string      // what isolated sessions write is below it
	Init          bool        // this process has the duties of PID 1
	Restart       func()      // of the entrypoint; nil where there is none
	JupyterHost   string
	JupyterToken  string
	Log           *log.Logger
}

// Server answers requests.
type Server struct {
	binding     *Binding
	hooks       *Hooks
	restart     func() // of the entrypoint; nil where there is none
	port        int
	env         *Environment
	log         *log.Logger
	connections *Connections
	endLimit    time.Duration // for what a former owner left
	proxy       *portProxy

	commands   *Commands
	sessions   *Sessions
	terminals  *Terminals
	code       *CodeContexts
	files      *Files
	identities *Identities
	isolation  *Isolation
	metrics    *Metrics
	routes     []routeTo // but those of files and of isolated sessions
}

// New makes the handlers of all routes; it starts nothing.
func New(o Options) *Server {
	jupyter, err := NewJupyter(o.JupyterHost, o.JupyterToken)
	if err != nil {
		o.Log.Print(err)
	}
	s := &Server{
		binding: o.Binding, hooks: o.Hooks, restart: o.Restart, port: o.Port, env: o.Launcher.env, log: o.Log,
		connections: NewConnections(), endLimit: stateEnding,
		proxy:      newProxy(func(line string) { o.Log.Print(line) }),
		commands:   NewCommands(o.Launcher),
		sessions:   NewSessions(o.Launcher),
		terminals:  NewTerminals(o.Launcher),
		files:      NewFiles(o.Launcher.env, o.Launcher.accounts, o.Launcher.directory, o.Umask),
		identities: NewIdentities(o.Launcher.reaper, o.Launcher.accounts, o.Log, o.Program),
		isolation:  NewIsolation(o.Launcher, isFileRoute, o.Program, o.IsolationRoot, o.Init),
		metrics:    NewMetrics(),
	}
	s.code = NewCodeContexts(jupyter, o.Launcher, s.commands)
	s.routes = slices.Concat(
		s.commands.routes(), s.sessions.routes(), s.terminals.routes(), s.code.routes(), s.metrics.routes(),
		[]routeTo{{"DELETE", "/command", always(s.interrupt)}, {"DELETE", "/code", always(s.interrupt)}},
	)
	return s
}

// Serve accepts connections until the listener breaks or is closed.
func (s *Server) Serve(listener net.Listener) error {
	bounded := &boundedListener{Listener: listener, connections: s.connections, launch: s.binding.now}
	server := s.connections.server(s, s.log)
	server.ConnContext = withConnection
	return server.Serve(bounded)
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	boundBody(w, r)
	if !r.ProtoAtLeast(1, 1) {
		closeAfter(w) // net/http ignores the Transfer-Encoding of such a request: where its body ends is not known
	}
	raw := s.withoutOwnProxy(rawPath(r))
	path, err := splitPath(raw)
	if err != nil {
		writeError(w, badRequest("invalid path"))
		return
	}
	if r.Method == http.MethodGet && path.is("ping") {
		writeEmpty(w)
		return
	}
	restored, err := s.binding.look()
	if restored {
		s.log.Print("restored from a checkpoint: nobody is served before an init")
		s.closeFormer()
	}
	switch {
	case err != nil:
		writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, err.Error()})
		return
	case r.Method == http.MethodGet && path.is("ready"):
		s.binding.serveReady(w, r)
		return
	case r.Method == http.MethodPost && path.is("internal", "init") && s.binding.offers():
		s.initialise(w, r)
		return
	}
	done, err := s.binding.admit(r)
	if err != nil {
		writeError(w, err)
		return
	}
	defer done()
	if rest, ok := strings.CutPrefix(raw, "/proxy"); ok && (rest == "" || rest[0] == '/') {
		s.serveProxy(w, r, rest)
		return
	}
	handler := s.route(r.Method, path.withoutLastSlash())
	if handler == nil {
		notFound(w)
		return
	}
	handler(w, r)
}

// route finds the handler of a request; nil where there is none.
func (s *Server) route(method string, path requestPath) http.HandlerFunc {
	if handler := findRoute(s.routes, method, path); handler != nil {
		return handler
	}
	if rest, ok := path.below("v1", "isolated"); ok {
		return s.isolation.route(method, rest)
	}
	if rest, ok := path.below("v1", "filesystem"); ok {
		return s.identities.route(method, rest)
	}
	if rest, ok := path.below(); ok {
		return s.files.route(method, rest)
	}
	return nil
}

// closeFormer closes the connections that began in another launch than this one.
func (s *Server) closeFormer() {
	now, _ := s.binding.now() // if that is not known, all are closed
	s.connections.closeFormer(now)
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

// Package server is the HTTP surface: authentication, routes, and which caller may use them. connections.go bounds
// connections, and serving.go keeps the listener open.
//
// Invariants
//   - Only /ping and /ready are served without the token; binding.go decides which caller may init.
//   - Unknown path or method: 404; never a redirect.
//   - After a restore no request is served before an init, on old or new connections.
//   - /proxy/<own port>/… is equal to the request without that prefix, at any depth of nesting.
package server

import (
	"log"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"sallyport.dev/execd/internal/command"
	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/files"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/isolate"
	"sallyport.dev/execd/internal/jupyter"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/session"
	"sallyport.dev/execd/internal/supervise"
	"sallyport.dev/execd/internal/terminal"
)

// Options are the parts and settings of a Server.
type Options struct {
	Port          int
	Binding       *Binding
	Hooks         *supervise.Hooks
	Launcher      *process.Launcher
	Umask         os.FileMode      // for files whose mode the request does not set
	Program       *process.Program // this program, to start helpers; nil if there are no helpers
	IsolationRoot string           // directory below which isolated sessions write
	Init          bool             // this process has the duties of PID 1
	Restart       func()           // restarts the entrypoint; nil if there is none
	Begin         func(Beginning)  // starts hooks and entrypoint at the first init; nil if they start without one
	Entrypoint    []string         // for Begin, if the init names none
	JupyterHost   string
	JupyterToken  string
	Log           *log.Logger
}

// Server serves the API.
type Server struct {
	binding     *Binding
	hooks       *supervise.Hooks
	restart     func() // restarts the entrypoint; nil if there is none
	begin       func(Beginning)
	entrypoint  []string
	begun       bool // begin was called; guarded by Binding.under
	port        int
	env         *environ.Environment
	log         *log.Logger
	connections *Connections
	endLimit    time.Duration // for ending the state of a former owner
	proxy       *portProxy

	commands   *command.Commands
	sessions   *session.Sessions
	terminals  *terminal.Terminals
	code       *jupyter.Contexts
	files      *files.Files
	identities *files.Identities
	isolation  *isolate.Isolation
	metrics    *Metrics
	routes     []httpx.Route // without those of files and of isolated sessions
}

// New makes a Server with the handlers of all routes. It starts nothing.
func New(o Options) *Server {
	notebook, err := jupyter.NewJupyter(o.JupyterHost, o.JupyterToken)
	if err != nil {
		o.Log.Print(err)
	}
	s := &Server{
		binding: o.Binding, hooks: o.Hooks, restart: o.Restart, begin: o.Begin, entrypoint: o.Entrypoint, port: o.Port, env: o.Launcher.Env, log: o.Log,
		connections: NewConnections(), endLimit: stateEnding,
		proxy:      newProxy(func(line string) { o.Log.Print(line) }),
		commands:   command.New(o.Launcher),
		sessions:   session.New(o.Launcher),
		terminals:  terminal.New(o.Launcher),
		files:      files.New(o.Launcher.Env, o.Launcher.Accounts, o.Launcher.Directory, o.Umask),
		identities: files.NewIdentities(o.Launcher.Reaper, o.Launcher.Accounts, o.Log, o.Program),
		isolation:  isolate.New(o.Launcher, files.IsFileRoute, o.Program, o.IsolationRoot, o.Init),
		metrics:    NewMetrics(),
	}
	s.code = jupyter.New(notebook, o.Launcher, s.commands)
	s.routes = slices.Concat(
		s.commands.Routes(), s.sessions.Routes(), s.terminals.Routes(), s.code.Routes(), s.metrics.routes(),
		[]httpx.Route{{Method: "DELETE", Path: "/command", Handler: httpx.Always(s.interrupt)}, {Method: "DELETE", Path: "/code", Handler: httpx.Always(s.interrupt)}},
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
	httpx.BoundBody(w, r)
	if !r.ProtoAtLeast(1, 1) {
		httpx.CloseAfter(w) // net/http ignores Transfer-Encoding before HTTP/1.1, so the body's end is unknown
	}
	raw := s.withoutOwnProxy(rawPath(r))
	path, err := httpx.SplitPath(raw)
	if err != nil {
		httpx.WriteError(w, httpx.BadRequest("invalid path"))
		return
	}
	if r.Method == http.MethodGet && path.Is("ping") {
		httpx.WriteEmpty(w)
		return
	}
	restored, err := s.binding.look()
	if restored {
		s.log.Print("restored from a checkpoint: no request is served before POST /internal/init")
		s.closeFormer()
	}
	switch {
	case err != nil:
		httpx.WriteError(w, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, err.Error()))
		return
	case r.Method == http.MethodGet && path.Is("ready"):
		s.binding.serveReady(w, r)
		return
	case r.Method == http.MethodPost && path.Is("internal", "init") && s.binding.offers():
		s.initialise(w, r)
		return
	}
	done, err := s.binding.admit(r)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	defer done()
	if rest, ok := strings.CutPrefix(raw, "/proxy"); ok && (rest == "" || rest[0] == '/') {
		s.serveProxy(w, r, rest)
		return
	}
	handler := s.route(r.Method, path.WithoutLastSlash())
	if handler == nil {
		httpx.NotFound(w)
		return
	}
	handler(w, r)
}

// route returns the handler of a request, or nil if there is none.
func (s *Server) route(method string, path httpx.Path) http.HandlerFunc {
	if handler := httpx.FindRoute(s.routes, method, path); handler != nil {
		return handler
	}
	if rest, ok := path.Below("v1", "isolated"); ok {
		return s.isolation.Route(method, rest)
	}
	if rest, ok := path.Below("v1", "filesystem"); ok {
		return s.identities.Route(method, rest)
	}
	if rest, ok := path.Below(); ok {
		return s.files.Route(method, rest)
	}
	return nil
}

// closeFormer closes the connections that began in another launch than this one.
func (s *Server) closeFormer() {
	now, _ := s.binding.now() // if the launch is unknown, all connections are closed
	s.connections.closeFormer(now)
}

// interrupt ends the run of an id: that of a session, a code context or a command.
func (s *Server) interrupt(w http.ResponseWriter, r *http.Request) {
	if s.sessions.Interrupt(r.URL.Query().Get("id")) {
		httpx.WriteEmpty(w)
		return
	}
	if s.code.Interrupt(w, r) {
		return
	}
	s.commands.Interrupt(w, r)
}

// rawPath returns the path as it was sent.
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

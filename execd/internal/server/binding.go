package server

// POST /internal/init and GET /ready, for a daemon that was started without an owner, that gets another owner, or that
// was restored from a checkpoint.
//
// Invariants
//   - The init route exists only if the daemon was started with --runtime-init, was restored, or awaits its first init
//     (--await-init). While the daemon has a token, a caller needs that token to bind again. Without a token, the caller needs the launch's secret; without a
//     launch file, the first caller may bind.
//   - Until the first init has succeeded, the daemon serves only /ping, /ready and the init.
//   - Each request first compares the launch with the launch that the binding belongs to. After a restore they differ.
//     Then former tokens are invalid, connections from before are closed, and the state is that before the first init.
//   - Identity, token and variables change together; from then on former tokens are invalid.
//   - Unless runtime state is preserved, an init serves no request until all state of earlier callers has ended: their
//     requests, hooks, commands with their records and output, sessions, terminals, isolated sessions, kernels,
//     helpers, and their changes of the EXECD_ENVS file. If a part of it does not end in time, the init fails.
//   - A generation never decreases, except after a restore.
//   - A daemon that awaits its first init starts neither hooks nor entrypoint before it. They begin once, the answer does
//     not wait for them, and the init route is gone then. The files that this init names are written before them; if one
//     cannot be written, the init fails and nothing begins.

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/supervise"
)

// initBodyLimit allows for an environment and an entrypoint as large as the kernel takes them, escaped in JSON.
const initBodyLimit = 12 << 20

const argumentsLimit = 256

// filesLimit is the largest number of files of an init.
const filesLimit = 64

// Binding is the owner of this daemon: its launch, token and generation.
type Binding struct {
	mutex      sync.RWMutex
	launch     *Launch // nil: there is no launch file
	of         Auth    // the launch that the other fields belong to; its secret permits the first init
	auth       Auth
	enabled    bool // --runtime-init, or restored
	bound      bool // an init has succeeded
	ready      bool
	generation int64
	ending     bool         // an init is ending the state of earlier callers
	requests   atomic.Int64 // number of requests admitted and not finished
	under      sync.Mutex   // one init at a time
}

// NewBinding makes a binding with the token of the command line. If enabled is set, the daemon waits for an init.
// Without a launch file restores are not detected.
func NewBinding(auth Auth, enabled bool, launchFile string) (*Binding, error) {
	made := &Binding{auth: auth, enabled: enabled}
	if launchFile == "" {
		return made, nil
	}
	var err error
	if made.launch, err = OpenLaunch(launchFile); err == nil {
		made.of, err = made.launch.Read()
	}
	return made, err
}

// now reads the current launch; without a launch file it is the zero Auth.
func (b *Binding) now() (Auth, error) {
	if b.launch == nil {
		return Auth{}, nil
	}
	return b.launch.Read()
}

// look resets the binding if the launch has changed since the last call. It reports restored once for each restore.
func (b *Binding) look() (restored bool, err error) {
	now, err := b.now()
	if err != nil {
		return false, err
	}
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if restored = now != b.of; restored {
		b.of, b.auth, b.enabled, b.bound, b.ready = now, Auth{}, true, false, false
	}
	return restored, nil
}

// offers reports whether the init route exists.
func (b *Binding) offers() bool {
	b.mutex.RLock()
	defer b.mutex.RUnlock()
	return b.enabled
}

var errNotInitialised = httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "not initialised")

// withdraw removes the init route. It exists again after a restore.
func (b *Binding) withdraw() {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.enabled = false
}

// admit admits a request that carries the token. The caller must call done when the request has ended.
func (b *Binding) admit(r *http.Request) (done func(), err error) {
	b.mutex.RLock()
	defer b.mutex.RUnlock()
	switch {
	case b.ending || b.enabled && !b.bound:
		return nil, errNotInitialised
	case !b.auth.Allows(r):
		return nil, unauthorized
	}
	b.requests.Add(1)
	return func() { b.requests.Add(-1) }, nil
}

// setEnding sets whether requests are refused because an init is ending the state of earlier callers.
func (b *Binding) setEnding(ending bool) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.ending = ending
}

// SetReady sets whether the start hooks have succeeded.
func (b *Binding) SetReady(ready bool) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.ready = ready
}

// serveReady answers GET /ready.
func (b *Binding) serveReady(w http.ResponseWriter, _ *http.Request) {
	b.mutex.RLock()
	ready, generation := b.ready && (b.bound || !b.enabled), b.generation
	b.mutex.RUnlock()
	if !ready {
		httpx.WriteError(w, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "not ready"))
		return
	}
	httpx.WriteJSON(w, http.StatusOK, map[string]any{"ready": true, "generation": generation})
}

// admits reports whether the caller of an init is allowed, and for which launch.
func (b *Binding) admits(r *http.Request) (of Auth, ok bool) {
	b.mutex.RLock()
	defer b.mutex.RUnlock()
	switch {
	case b.auth.set || b.auth.open || b.bound:
		return b.of, b.auth.Allows(r)
	case b.launch != nil:
		return b.of, b.of.Allows(r)
	}
	return b.of, true
}

// Beginning is what a daemon that awaits its first init starts.
type Beginning struct {
	Lifecycle  supervise.Lifecycle
	Entrypoint []string
}

// initFile is a file that an init names: its path, as for an upload, and its content.
type initFile struct {
	Path    string `json:"path"`
	Content string `json:"content"`
}

type initRequest struct {
	SandboxID            string             `json:"sandboxId"`
	Generation           int64              `json:"generation"`
	AccessTokenHash      string             `json:"accessTokenHash"`
	Envs                 map[string]*string `json:"envs"`
	Lifecycle            json.RawMessage    `json:"lifecycle"`
	Entrypoint           []string           `json:"entrypoint"`
	Files                []initFile         `json:"files"`
	EntrypointPolicy     string             `json:"entrypointPolicy"`
	PreserveRuntimeState bool               `json:"preserveRuntimeState"`

	auth      Auth
	lifecycle supervise.Lifecycle
	variables map[string]string
}

func (r *initRequest) check() error {
	if r.SandboxID == "" || len(r.SandboxID) > 256 || strings.IndexByte(r.SandboxID, 0) >= 0 {
		return errors.New("sandboxId is missing or too long")
	}
	if r.Generation < 0 {
		return errors.New("generation must not be negative")
	}
	hash, ok := strings.CutPrefix(r.AccessTokenHash, "sha256:")
	var err error
	if r.auth, err = NewAuth(strings.ToLower(hash), false); !ok || err != nil {
		return errors.New("accessTokenHash must be sha256: and 64 hexadecimal digits")
	}
	if !slices.Contains([]string{"", "keep", "restart"}, r.EntrypointPolicy) {
		return errors.New("entrypointPolicy is keep or restart")
	}
	if len(r.Entrypoint) > argumentsLimit || len(r.Entrypoint) > 0 && r.Entrypoint[0] == "" || slices.ContainsFunc(r.Entrypoint, hasNUL) {
		return errors.New("entrypoint needs a program, has too many arguments, or holds a NUL")
	}
	if len(r.Files) > filesLimit {
		return errors.New("too many files")
	}
	r.variables = map[string]string{}
	for name, value := range r.Envs {
		if !environ.IsName(name) || slices.Contains(environ.Credentials, name) || (value != nil && strings.IndexByte(*value, 0) >= 0) {
			return errors.New("envs has a reserved or invalid name, or an invalid value")
		}
		if value != nil {
			r.variables[name] = *value
		}
	}
	r.variables["OPENSANDBOX_ID"] = r.SandboxID
	if name, err := os.Hostname(); err == nil && r.Envs["HOSTNAME"] == nil {
		r.variables["HOSTNAME"] = name // a restored sandbox has another host name
	}
	r.lifecycle, err = supervise.ParseLifecycle(r.Lifecycle)
	return err
}

func hasNUL(text string) bool { return strings.IndexByte(text, 0) >= 0 }

// accepts reports whether bind would succeed in the present state.
func (b *Binding) accepts(request *initRequest, of Auth) bool {
	b.mutex.RLock()
	defer b.mutex.RUnlock()
	return b.of == of && (!b.bound || request.Generation >= b.generation)
}

// bind replaces identity, token and variables. It returns false for an older generation or another launch.
func (b *Binding) bind(request *initRequest, of Auth, env *environ.Environment) bool {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if b.of != of || b.bound && request.Generation < b.generation {
		return false
	}
	b.auth, b.generation, b.bound, b.ready = request.auth, request.Generation, true, false
	env.Bind(request.variables)
	return true
}

// initialise answers POST /internal/init.
func (s *Server) initialise(w http.ResponseWriter, r *http.Request) {
	if _, ok := s.binding.admits(r); !ok {
		httpx.WriteError(w, unauthorized)
		return
	}
	if !s.binding.under.TryLock() { // do not wait: the preStart hook of the other init can take hours
		httpx.WriteError(w, httpx.NewProblem(http.StatusConflict, httpx.CodeRuntime, "another init is under way"))
		return
	}
	defer s.binding.under.Unlock()
	of, ok := s.binding.admits(r)
	if !ok { // another init has succeeded since the first check
		httpx.WriteError(w, unauthorized)
		return
	}
	var request initRequest
	if err := httpx.DecodeJSON(w, r, initBodyLimit, &request); err != nil {
		httpx.WriteError(w, err)
		return
	}
	if err := request.check(); err != nil {
		httpx.WriteError(w, httpx.BadRequest(err.Error()))
		return
	}
	awaited := s.begin != nil && !s.begun
	if !awaited && len(request.Entrypoint)+len(request.Files) > 0 {
		httpx.WriteError(w, httpx.BadRequest("entrypoint and files are for a daemon that awaits its first init"))
		return
	}
	if err := s.hand(r, &request, of); err != nil {
		httpx.WriteError(w, err)
		return
	}
	if awaited {
		for _, file := range request.Files {
			if err := s.files.Put(file.Path, file.Content); err != nil {
				s.log.Printf("init: a file cannot be written: %v", err)
				httpx.WriteError(w, httpx.NewProblem(http.StatusUnprocessableEntity, httpx.CodeRuntime, "a file cannot be written: "+err.Error()))
				return
			}
		}
		s.begun = true
		s.binding.withdraw()
		if len(request.Entrypoint) == 0 {
			request.Entrypoint = s.entrypoint
		}
		s.begin(Beginning{request.lifecycle, request.Entrypoint})
		writeBound(w, &request)
		return
	}
	if kept := request.PreserveRuntimeState && isNull(request.Lifecycle); !kept {
		if err := s.hooks.Begin(request.lifecycle); err != nil {
			s.log.Print(err)
			httpx.WriteError(w, err)
			return
		}
	}
	if request.EntrypointPolicy == "restart" && s.restart != nil {
		s.restart()
	}
	s.binding.SetReady(true)
	writeBound(w, &request)
}

func writeBound(w http.ResponseWriter, request *initRequest) {
	httpx.WriteJSON(w, http.StatusOK, map[string]any{"sandboxId": request.SandboxID, "generation": request.Generation})
}

var errOlderGeneration = httpx.NewProblem(http.StatusConflict, httpx.CodeInvalidBody, "generation is older than the one in force")

// hand binds the daemon to the owner that an init names. Before the daemon serves that owner, it ends the state of
// earlier callers. If runtime state is preserved, it reseeds the kernels instead.
func (s *Server) hand(r *http.Request, request *initRequest, of Auth) error {
	if !s.binding.accepts(request, of) {
		return errOlderGeneration
	}
	if request.PreserveRuntimeState {
		s.code.Reseed()
	} else {
		s.binding.setEnding(true)
		defer s.binding.setEnding(false)
		if err := s.endState(r); err != nil {
			s.log.Printf("init: %v", err)
			return err
		}
	}
	if !s.binding.bind(request, of, s.env) {
		return errOlderGeneration
	}
	return nil
}

// isNull reports whether a value is missing or null.
func isNull(value json.RawMessage) bool { return len(value) == 0 || string(value) == "null" }

package server

// POST /internal/init and GET /ready, for a daemon that was started without an owner,
// that gets another owner, or that was restored from a checkpoint.
//
// Invariants
//   - The route exists only if the daemon was started with --runtime-init, or restored.
//     While the daemon has a token, a caller needs that token to bind again. Without one, the
//     caller needs the launch's secret; without a launch file, the first caller may bind.
//   - Until the first init has succeeded nothing but /ping, /ready and the init answers.
//   - Each request looks first whether this is still the launch that all is bound to. After
//     a restore it is not: no former token counts, connections from before are closed, and
//     all is as before the first init.
//   - Identity, token and variables change together; from then on no former token counts.
//   - Unless runtime state is preserved, an init serves no request until all that earlier callers
//     left has ended: their requests, hooks, commands with their records and output, sessions,
//     terminals, isolated sessions, kernels, helpers, and what they put into the EXECD_ENVS
//     file. What cannot be ended in time fails the init.
//   - A generation never goes back, but by a restore.

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

const initBodyLimit = 1 << 20

// Binding is whose daemon this is.
type Binding struct {
	mutex      sync.RWMutex
	launch     *Launch // nil: there is no launch file
	of         Auth    // the launch that the rest belongs to; its secret may bind what is not bound
	auth       Auth
	enabled    bool // --runtime-init, or restored
	bound      bool // an init has succeeded
	ready      bool
	generation int64
	ending     bool         // an init ends what was there before
	requests   atomic.Int64 // admitted and not over yet
	under      sync.Mutex   // one init at a time
}

// NewBinding starts with the token of the command line; enabled waits for an init.
// Without a launch file restores are not noticed.
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

// now is the launch of this moment.
func (b *Binding) now() (Auth, error) {
	if b.launch == nil {
		return Auth{}, nil
	}
	return b.launch.Read()
}

// look unbinds everything if this is another launch than before; it says so once.
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

// offers reports whether there is an init to call.
func (b *Binding) offers() bool {
	b.mutex.RLock()
	defer b.mutex.RUnlock()
	return b.enabled
}

var errNotInitialised = httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "not initialised")

// admit lets a request in that carries the token; done is to be called after it.
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

// setEnding begins or ends the time in which no request is admitted.
func (b *Binding) setEnding(ending bool) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.ending = ending
}

// SetReady is called when the start hooks have succeeded, or will run again.
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

// admits decides about a caller of the init, and says in which launch.
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

type initRequest struct {
	SandboxID            string             `json:"sandboxId"`
	Generation           int64              `json:"generation"`
	AccessTokenHash      string             `json:"accessTokenHash"`
	Envs                 map[string]*string `json:"envs"`
	Lifecycle            json.RawMessage    `json:"lifecycle"`
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
		r.variables["HOSTNAME"] = name // a restored sandbox has another one
	}
	r.lifecycle, err = supervise.ParseLifecycle(r.Lifecycle)
	return err
}

// accepts reports whether bind will do it, as things are.
func (b *Binding) accepts(request *initRequest, of Auth) bool {
	b.mutex.RLock()
	defer b.mutex.RUnlock()
	return b.of == of && (!b.bound || request.Generation >= b.generation)
}

// bind exchanges identity and token; false for an older generation or another launch.
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
	if !s.binding.under.TryLock() { // its preStart may take hours: no request waits for that
		httpx.WriteError(w, httpx.NewProblem(http.StatusConflict, httpx.CodeRuntime, "another init is under way"))
		return
	}
	defer s.binding.under.Unlock()
	of, ok := s.binding.admits(r)
	if !ok { // another init has come in between
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
	if err := s.hand(r, &request, of); err != nil {
		httpx.WriteError(w, err)
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
	httpx.WriteJSON(w, http.StatusOK, map[string]any{"sandboxId": request.SandboxID, "generation": request.Generation})
}

var errOlderGeneration = httpx.NewProblem(http.StatusConflict, httpx.CodeInvalidBody, "generation is older than the one in force")

// hand gives the daemon to the owner that an init names. Before that owner is served, what
// earlier callers left has ended, or the kernels that are kept are reseeded.
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

// isNull reports whether a value was not given.
func isNull(value json.RawMessage) bool { return len(value) == 0 || string(value) == "null" }

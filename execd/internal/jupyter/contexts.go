// Package jupyter serves code contexts: stateful runs in the kernels of a
// Jupyter server.
//
// Invariants
//   - A context runs one request at a time; another request meanwhile is refused before
//     any event is sent.
//   - There is one default context per language, also under concurrent requests.
//   - Contexts are bounded in number; one that is being made or ended counts.
//   - A client that leaves while its context is being made leaves no kernel. A default
//     context is given up when the last one that waits for it leaves.
//   - After an init no run sees random numbers that a kernel had made ready before it,
//     where the language lets them be replaced.
package jupyter

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/stream"
)

const (
	contextLimit   = 64
	contextEnding  = 10 * time.Second
	contextLook    = 10 * time.Millisecond
	reseedLimit    = 10 * time.Second
	interpreterRun = 24 * time.Hour
)

var languages = map[string]bool{
	"python": true, "java": true, "javascript": true, "typescript": true, "go": true, "bash": true,
}

// reseedCode replaces the state of a language's generators. Those of V8 and Deno, Java's
// Math.random, and what a program made for itself cannot be reached.
var reseedCode = map[string]string{
	"python": `exec('''
import contextlib, os, sys
for name, reseed in {
    "random": lambda module: module.seed(), "numpy.random": lambda module: module.seed(),
    "torch": lambda module: module.seed(), "ssl": lambda module: module.RAND_add(os.urandom(32), 32.0),
}.items():
    if name in sys.modules:
        with contextlib.suppress(Exception):
            reseed(sys.modules[name])
''', {})`,
	"bash": "RANDOM=${SRANDOM-$RANDOM}",
}

// shellRunner answers a request with the run of a command.
type shellRunner interface {
	RunShell(w http.ResponseWriter, r *http.Request, command string, background bool)
}

// Contexts is the table of all contexts.
type Contexts struct {
	jupyter  *Jupyter
	launcher *process.Launcher
	shell    shellRunner

	mutex    sync.Mutex
	byID     map[string]*kernelContext
	standard map[string]*standardContext // by language
	pending  int                         // contexts that are being made or ended
	seeds    int                         // how often kernels were to be reseeded
}

type kernelContext struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd,omitempty"`
	session  jupyterSession
	link     *kernelLink

	// Guarded by CodeContexts:
	running *codeRun // nil if nothing runs
	seeds   int      // of CodeContexts, when this kernel was reseeded; it may be older than its context
}

// standardContext is a default context, or its creation.
type standardContext struct {
	waiting int                // requests; guarded by CodeContexts, as got and made are
	got     bool               // a request got the context
	giveUp  context.CancelFunc // the making
	made    *kernelContext
	done    chan struct{} // closed when made or err is set for good
	err     error
}

// New creates no context yet. Code without a language is for the shell.
func New(jupyter *Jupyter, launcher *process.Launcher, shell shellRunner) *Contexts {
	return &Contexts{
		jupyter: jupyter, launcher: launcher, shell: shell, byID: map[string]*kernelContext{}, standard: map[string]*standardContext{},
	}
}

func unknownLanguage(language string) *httpx.Problem {
	return httpx.BadRequest("unknown language: " + language)
}

func noContext(id string) *httpx.Problem {
	return httpx.NewProblem(http.StatusNotFound, httpx.CodeContextNotFound, "context "+id+" not found")
}

// Routes are the routes of the contract that this package serves.
func (c *Contexts) Routes() []httpx.Route {
	return []httpx.Route{
		{Method: "POST", Path: "/code", Handler: httpx.Always(c.run)},
		{Method: "POST", Path: "/code/context", Handler: httpx.Always(c.create)},
		{Method: "GET", Path: "/code/contexts", Handler: httpx.Always(c.list)},
		{Method: "DELETE", Path: "/code/contexts", Handler: httpx.Always(c.deleteAll)},
		{Method: "GET", Path: "/code/contexts/{}", Handler: c.get},
		{Method: "DELETE", Path: "/code/contexts/{}", Handler: c.deleteContext},
	}
}

func (c *Contexts) create(w http.ResponseWriter, r *http.Request) {
	made, err := c.createFrom(w, r)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	httpx.WriteJSON(w, http.StatusOK, made)
}

// createFrom creates the context that the body of a request describes.
func (c *Contexts) createFrom(w http.ResponseWriter, r *http.Request) (*kernelContext, error) {
	var request struct {
		Language *string `json:"language"`
		Cwd      *string `json:"cwd"`
	}
	if err := httpx.DecodeJSON(w, r, httpx.CommandBodyLimit, &request); err != nil {
		return nil, err
	}
	if request.Language == nil {
		return nil, unknownLanguage("")
	}
	if !languages[*request.Language] {
		return nil, unknownLanguage(*request.Language)
	}
	directory := ""
	if request.Cwd != nil && *request.Cwd != "" {
		var err error
		if directory, err = c.launcher.NewDirectory(*request.Cwd); err != nil {
			return nil, httpx.BadRequest(err.Error())
		}
	}
	return c.begin(r.Context(), *request.Language, directory, nil)
}

// begin starts a kernel and adds its context to the table, for a default context or for none (nil).
func (c *Contexts) begin(ctx context.Context, language, directory string, standard *standardContext) (*kernelContext, error) {
	c.mutex.Lock()
	if len(c.byID)+c.pending >= contextLimit {
		c.mutex.Unlock()
		return nil, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many code contexts")
	}
	c.pending++
	c.mutex.Unlock()
	session, err := c.jupyter.start(ctx, language, directory)
	if err != nil {
		c.release()
		return nil, httpx.RuntimeError(err)
	}
	made := &kernelContext{ID: session.ID, Language: language, Cwd: directory, session: session}
	if !c.take(ctx, made, standard) {
		c.jupyter.endSurely(session)
		c.release()
		return nil, httpx.ErrLeft
	}
	return made, nil
}

// take adds a new context to the table, if it is still wanted.
func (c *Contexts) take(ctx context.Context, made *kernelContext, standard *standardContext) bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if ctx.Err() != nil {
		return false
	}
	made.link = c.jupyter.link(made.session)
	c.pending--
	c.byID[made.ID] = made
	if standard != nil {
		standard.made = made
	}
	return true
}

// release returns the place of a context whose creation or end is over.
func (c *Contexts) release() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.pending--
}

// defaultOf returns the default context of a language. Many callers wait for one creation.
func (c *Contexts) defaultOf(ctx context.Context, language string) (*kernelContext, error) {
	c.mutex.Lock()
	item := c.standard[language]
	if item == nil {
		making, giveUp := context.WithCancel(context.Background())
		item = &standardContext{done: make(chan struct{}), giveUp: giveUp}
		c.standard[language] = item
		go c.makeDefault(making, language, item)
	}
	item.waiting++
	c.mutex.Unlock()
	select {
	case <-item.done:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		c.waitNoMore(language, item, false)
		return nil, httpx.ErrLeft
	}
	c.waitNoMore(language, item, true)
	return item.made, item.err
}

func (c *Contexts) makeDefault(ctx context.Context, language string, item *standardContext) {
	defer close(item.done)
	defer item.giveUp()
	if _, item.err = c.begin(ctx, language, "", item); item.err != nil {
		c.mutex.Lock()
		defer c.mutex.Unlock()
		c.forget(language, item)
	}
}

// waitNoMore drops a default context if no request waits for it and none got it.
func (c *Contexts) waitNoMore(language string, item *standardContext, got bool) {
	c.mutex.Lock()
	item.waiting--
	item.got = item.got || got
	unwanted := item.waiting == 0 && !item.got
	made := item.made
	if unwanted {
		c.forget(language, item)
	}
	if unwanted && made == nil {
		item.giveUp()
	}
	c.mutex.Unlock()
	if unwanted && made != nil {
		c.drop(made)
	}
}

// forget removes a default context from the table. The mutex is held.
func (c *Contexts) forget(language string, item *standardContext) {
	if c.standard[language] == item {
		delete(c.standard, language)
	}
}

func (c *Contexts) list(w http.ResponseWriter, r *http.Request) {
	language := r.URL.Query().Get("language")
	switch language {
	case "command", "background-command", "sql":
		httpx.WriteError(w, httpx.RuntimeError(errors.New("there are no contexts of "+language)))
		return
	}
	c.mutex.Lock()
	found := []*kernelContext{}
	for _, item := range c.byID {
		if language == "" || item.Language == language {
			found = append(found, item)
		}
	}
	c.mutex.Unlock()
	sort.Slice(found, func(a, b int) bool { return found[a].ID < found[b].ID })
	httpx.WriteJSON(w, http.StatusOK, found)
}

func (c *Contexts) find(id string) *kernelContext {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.byID[id]
}

func (c *Contexts) get(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if found := c.find(id); found != nil {
			httpx.WriteJSON(w, http.StatusOK, found)
			return
		}
		httpx.WriteError(w, noContext(id))
	}
}

func (c *Contexts) deleteContext(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		found := c.find(id)
		if found == nil {
			httpx.WriteError(w, noContext(id))
			return
		}
		c.drop(found)
		httpx.WriteEmpty(w)
	}
}

func (c *Contexts) deleteAll(w http.ResponseWriter, r *http.Request) {
	language := r.URL.Query().Get("language")
	if language == "" {
		httpx.WriteError(w, httpx.MissingQuery("language"))
		return
	}
	c.mutex.Lock()
	var dropped []*kernelContext
	for _, item := range c.byID {
		if item.Language == language {
			dropped = append(dropped, item)
		}
	}
	c.mutex.Unlock()
	for _, item := range dropped {
		c.drop(item)
	}
	httpx.WriteEmpty(w)
}

// drop removes a context, and ends its run and its kernel.
func (c *Contexts) drop(dropped *kernelContext) {
	ctx, cancel := context.WithTimeout(context.Background(), contextEnding)
	defer cancel()
	if err := c.end(ctx, dropped); err != nil {
		c.launcher.Log.Printf("a code context could not be ended: %v", err)
	}
}

// end is drop with a limit and a result. It does not wait for a context that another caller drops.
func (c *Contexts) end(ctx context.Context, dropped *kernelContext) error {
	c.mutex.Lock()
	if c.byID[dropped.ID] != dropped {
		c.mutex.Unlock()
		return nil
	}
	if dropped.running != nil {
		dropped.running.stop()
	}
	dropped.link.stop()
	delete(c.byID, dropped.ID)
	if item := c.standard[dropped.Language]; item != nil && item.made == dropped {
		delete(c.standard, dropped.Language)
	}
	c.pending++
	c.mutex.Unlock()
	defer c.release()
	return c.jupyter.end(ctx, dropped.session.ID)
}

// StopAll ends the runs in contexts, and cancels creations that later requests would use.
func (c *Contexts) StopAll() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for _, item := range c.byID {
		if item.running != nil {
			item.running.stop()
		}
	}
	for language, item := range c.standard {
		if item.made == nil {
			item.giveUp()
			delete(c.standard, language)
		}
	}
}

// EndAll ends every context, and then every kernel of the server. Requests that create contexts, or
// run code in them, have ended before.
func (c *Contexts) EndAll(ctx context.Context) error {
	c.StopAll()
	c.mutex.Lock()
	used := len(c.byID)+c.pending > 0
	c.mutex.Unlock()
	for {
		c.mutex.Lock()
		all, left := slices.Collect(maps.Values(c.byID)), len(c.byID)+c.pending
		c.mutex.Unlock()
		if left == 0 {
			break
		}
		var ending sync.WaitGroup
		for _, item := range all {
			ending.Go(func() { _ = c.end(ctx, item) }) // endKernels says whether it did
		}
		ending.Wait()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(contextLook):
		}
	}
	if err := c.jupyter.endKernels(ctx); err != nil && (used || mayHaveBegun(err)) {
		return err
	}
	return nil // a server that is not there has no kernel, if none was made
}

type codeRequest struct {
	Code    *string `json:"code"`
	Context *struct {
		ID       *string `json:"id"`
		Language *string `json:"language"`
	} `json:"context"`
}

// where returns the context id and the language of a request. Both can be empty.
func (r *codeRequest) where() (id, language string) {
	if r.Context != nil && r.Context.ID != nil {
		id = *r.Context.ID
	}
	if r.Context != nil && r.Context.Language != nil {
		language = *r.Context.Language
	}
	return id, language
}

func (c *Contexts) run(w http.ResponseWriter, r *http.Request) {
	var request codeRequest
	if err := httpx.DecodeJSON(w, r, httpx.CommandBodyLimit, &request); err != nil {
		httpx.WriteError(w, err)
		return
	}
	if request.Code == nil || strings.TrimSpace(*request.Code) == "" {
		httpx.WriteError(w, httpx.BadRequest("code must not be empty"))
		return
	}
	id, language := request.where()
	switch {
	case id == "" && (language == "" || language == "command" || language == "background-command"):
		c.shell.RunShell(w, r, *request.Code, language == "background-command")
		return
	case id == "" && !languages[language]:
		httpx.WriteError(w, unknownLanguage(language))
		return
	}
	used, err := c.choose(r, id, language)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	ctx, stop := context.WithTimeout(context.Background(), interpreterRun)
	defer stop()
	run := newCodeRun(stop)
	if err := c.enter(used, run); err != nil {
		httpx.WriteError(w, err)
		return
	}
	c.serve(ctx, w, used, run, *request.Code)
}

func (c *Contexts) choose(r *http.Request, id, language string) (*kernelContext, error) {
	if id == "" {
		return c.defaultOf(r.Context(), language)
	}
	if found := c.find(id); found != nil {
		return found, nil
	}
	return nil, httpx.ContextNotFound(id)
}

// enter refuses a context that has a run. Clients search for these words.
func (c *Contexts) enter(used *kernelContext, run *codeRun) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.byID[used.ID] != used {
		return httpx.ContextNotFound(used.ID)
	}
	if used.running != nil {
		return httpx.RuntimeError(errors.New("session is busy"))
	}
	used.running = run
	return nil
}

func (c *Contexts) leave(used *kernelContext) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	used.running = nil
}

// serve runs code to its end, also when the client disconnects, because the next run needs its state.
func (c *Contexts) serve(ctx context.Context, w http.ResponseWriter, used *kernelContext, run *codeRun, code string) {
	events := stream.New(w)
	events.Begin(used.ID)
	began := time.Now()
	done, attended := make(chan struct{}), make(chan struct{})
	var err error
	go func() {
		c.attend(used, run)
		close(attended)
	}()
	go func() {
		if err = c.freshen(ctx, used); err == nil {
			err = used.link.runCode(ctx, used.session.ID, code, events, run)
		}
		run.over.happen()
		<-attended
		close(done)
	}()
	events.PingUntil(done)
	c.leave(used) // before the end of the stream, after which the next run may come
	if err != nil && !errors.Is(err, errInterrupted) {
		c.drop(used)
		err = events.Fail(httpx.CodeRuntime, err.Error(), []string{})
	} else {
		if err != nil {
			events.CodeError(interruptName, err.Error(), nil)
		}
		err = events.Complete(time.Since(began))
	}
	if err != nil {
		panic(http.ErrAbortHandler) // a transfer that is cut off, not a stream without its end
	}
}

// Reseed replaces the random state of the kernels: of the idle ones now, of each other one
// before its next run. A kernel in which that fails is ended.
func (c *Contexts) Reseed() {
	c.mutex.Lock()
	c.seeds++
	all := slices.Collect(maps.Values(c.byID))
	c.mutex.Unlock()
	var idle sync.WaitGroup
	for _, item := range all {
		idle.Go(func() {
			ctx, stop := context.WithTimeout(context.Background(), reseedLimit)
			defer stop()
			if c.enter(item, newCodeRun(stop)) != nil {
				return
			}
			err := c.freshen(ctx, item)
			c.leave(item)
			if err != nil {
				c.drop(item)
			}
		})
	}
	idle.Wait()
}

// freshen reseeds the kernel of a context that is entered, if that is due.
func (c *Contexts) freshen(ctx context.Context, entered *kernelContext) error {
	c.mutex.Lock()
	due := c.seeds
	done := entered.seeds == due
	c.mutex.Unlock()
	if code := reseedCode[entered.Language]; code != "" && !done {
		if err := entered.link.runCode(ctx, entered.session.ID, code, nil, newCodeRun(nil)); err != nil {
			return err
		}
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	entered.seeds = due
	return nil
}

package isolate

// The routes of isolated sessions. isolate.go makes and ends the
// sessions.
//
// Invariants
//   - An unknown session is 404; for one whose processes have ended, the answer says so.
//   - Only the routes of a session's server are passed on to it.

import (
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/stream"
	"sallyport.dev/execd/internal/sys"
)

// Route finds the handler of a route below /v1/isolated; nil where there is none.
func (i *Isolation) Route(method, path string) http.HandlerFunc {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	switch {
	case method == http.MethodGet && path == "/capabilities":
		return i.capabilities
	case method == http.MethodPost && path == "/session":
		return i.available(i.create)
	case method == http.MethodGet && path == "/sessions":
		return i.available(i.list)
	case len(parts) < 2 || parts[0] != "session" || slices.Contains(parts, ""): // an id is never empty
		return nil
	case len(parts) == 2 && method == http.MethodGet:
		return i.available(func(w http.ResponseWriter, _ *http.Request) { i.get(w, parts[1]) })
	case len(parts) == 2 && method == http.MethodDelete:
		return i.available(func(w http.ResponseWriter, _ *http.Request) { i.deleteSession(w, parts[1]) })
	case len(parts) == 3 && (parts[2] == "diff" && method == http.MethodGet || parts[2] == "commit" && method == http.MethodPost):
		return func(w http.ResponseWriter, _ *http.Request) {
			httpx.WriteError(w, notSupported("diff and commit are not supported"))
		}
	case len(parts) < 3 || !i.isRoute(method, parts[2:]):
		return nil
	}
	return i.available(func(w http.ResponseWriter, r *http.Request) { i.forward(w, r, parts[1], parts[2:]) })
}

// isRoute reports whether the server of a session has a route.
func (i *Isolation) isRoute(method string, parts []string) bool {
	switch {
	case parts[0] == "run":
		return method == http.MethodPost && len(parts) == 1
	case parts[0] == "runs":
		return method == http.MethodGet && (len(parts) == 2 || len(parts) == 3 && parts[2] == "logs")
	}
	return i.files(method, "/"+strings.Join(parts, "/"))
}

// available answers 503 where there is no isolation.
func (i *Isolation) available(handler http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if why := i.unavailable(); why != "" {
			httpx.WriteError(w, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, why))
			return
		}
		handler(w, r)
	}
}

func (i *Isolation) capabilities(w http.ResponseWriter, _ *http.Request) {
	why := i.unavailable()
	answer := map[string]any{
		"available": why == "", "isolator": "execd", "version": version, "setpriv_available": why == "",
		"userns_available": false, "commit_supported": false, "diff_supported": false, "hardening": i.hardening(),
	}
	if why != "" {
		answer["message"] = why
	}
	httpx.WriteJSON(w, http.StatusOK, answer)
}

// hardening is what is in force for this process, as the kernel reports it.
func (i *Isolation) hardening() map[string]any {
	layer := func(state, message string) map[string]string {
		if message == "" {
			return map[string]string{"state": state}
		}
		return map[string]string{"state": state, "message": message}
	}
	mode := "none"
	switch {
	case os.Getpid() == 1:
		mode = "pid1"
	case i.pid1:
		mode = "subreaper"
	}
	status := map[string]string{}
	for line := range strings.Lines(sys.FileText("/proc/self/status")) {
		name, value, _ := strings.Cut(line, ":")
		status[name] = strings.TrimSpace(value)
	}
	seccomp := layer("disabled", "no filter is installed for this process")
	if status["Seccomp"] == "2" {
		seccomp = layer("active", "")
	}
	caps := layer("disabled", "commands have the capabilities of this process")
	if i.launcher.Reaper.IsAdmin() {
		caps = layer("active", "commands cannot mount, although isolated sessions can")
	}
	return map[string]any{
		"init_mode": mode, "signal_shield": os.Getpid() == 1, "cap_drop": caps, "seccomp": seccomp,
		"landlock": layer("disabled", "not used"), "ebpf": layer("unsupported", "not used"),
	}
}

func sessionNotFound(id string) *httpx.Problem {
	return httpx.NewProblem(http.StatusNotFound, "SESSION_NOT_FOUND", "isolated session "+id+" not found")
}

func (i *Isolation) create(w http.ResponseWriter, r *http.Request) {
	made, err := i.createFrom(w, r)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	answer := made.echo()
	answer["session_id"], answer["created_at"] = made.id, made.created
	httpx.WriteJSON(w, http.StatusCreated, answer)
}

// createFrom makes the session that the body of a request describes.
func (i *Isolation) createFrom(w http.ResponseWriter, r *http.Request) (*session, error) {
	var request request
	if err := httpx.DecodeJSON(w, r, httpx.CommandBodyLimit, &request); err != nil {
		return nil, err
	}
	plan, err := request.plan(i.root)
	if err != nil {
		return nil, err
	}
	if err := request.identity(plan, i.launcher); err != nil {
		return nil, err
	}
	if plan.Env, err = request.environment(i.launcher.Env.ForCommand(nil)); err != nil {
		return nil, err
	}
	return i.begin(&request, plan)
}

// echo is the request as it was taken.
func (s *session) echo() map[string]any {
	r := s.request
	answer := map[string]any{"overlays": r.Overlays, "profile": text(r.Profile, "strict"), "uid_mode": text(r.UIDMode, "setpriv")}
	if len(r.Overlays) == 1 {
		answer["workspace"] = overlay{Path: r.Overlays[0].Path, Mode: r.Overlays[0].Mode}
	}
	for name, given := range map[string]any{
		"extra_writable": r.Writable, "binds": r.Binds, "share_net": r.ShareNet, "env_passthrough": r.Env, "uid": r.UID,
		"gid": r.GID, "idle_timeout_seconds": r.IdleSeconds,
	} {
		if text, err := json.Marshal(given); err == nil && string(text) != "null" {
			answer[name] = given
		}
	}
	return answer
}

// state is the answer of both GET routes; mutex held.
func (s *session) state() map[string]any {
	answer := map[string]any{"status": "active", "created_at": s.created, "last_run_at": s.ran.UTC()}
	if s.dead() {
		answer["status"] = "dead"
		return answer
	}
	left := s.idleLimit()
	if left == 0 {
		return answer
	}
	if !s.held() { // else its clock does not run
		left = max(0, left-time.Since(s.used))
	}
	answer["idle_remaining_seconds"] = int64(left / time.Second)
	return answer
}

func (i *Isolation) list(w http.ResponseWriter, _ *http.Request) {
	i.mutex.Lock()
	all := make([]*session, 0, len(i.byID))
	for _, each := range i.byID {
		all = append(all, each)
	}
	slices.SortFunc(all, func(a, b *session) int { return a.created.Compare(b.created) })
	sessions := make([]map[string]any, len(all))
	for n, each := range all {
		sessions[n] = each.state()
		sessions[n]["session_id"] = each.id
	}
	i.mutex.Unlock()
	httpx.WriteJSON(w, http.StatusOK, map[string]any{"sessions": sessions})
}

func (i *Isolation) get(w http.ResponseWriter, id string) {
	found, err := i.find(id)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	answer := found.echo()
	i.mutex.Lock()
	maps.Copy(answer, found.state())
	i.mutex.Unlock()
	httpx.WriteJSON(w, http.StatusOK, answer)
}

func (i *Isolation) deleteSession(w http.ResponseWriter, id string) {
	if !i.remove(id) {
		httpx.WriteError(w, sessionNotFound(id))
		return
	}
	httpx.WriteEmpty(w)
}

// forward passes a request on to the server of a session, but for what the daemon knows itself.
func (i *Isolation) forward(w http.ResponseWriter, r *http.Request, id string, parts []string) {
	run := parts[0] == "run"
	found, err := i.use(id, run)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	defer i.release(found, run)
	if parts[0] == "runs" {
		i.serveRun(w, r, found, parts)
		return
	}
	found.helper.Forward(w, r, "/"+strings.Join(parts, "/"))
}

// broken answers a request that the server inside did not answer.
func (s *session) broken(w http.ResponseWriter, r *http.Request, _ error) {
	if r.URL.Path != "/run" {
		httpx.WriteError(w, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "the session's process has exited"))
		return
	}
	events := stream.New(w)
	events.Begin(httpx.UUID())
	if events.Fail("IsolatedError", "session process has exited", []string{}) != nil {
		panic(http.ErrAbortHandler)
	}
}

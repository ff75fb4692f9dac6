package main

// Isolated sessions (contract 11): sessions with a file system view, processes and
// temporary files of their own, inside one sandbox. isolated_spec.go checks what is
// asked for, isolated_view.go makes it, isolated_serve.go runs inside.
//
// They need CAP_SYS_ADMIN over the sandbox's own mounts. Without it nothing is
// pretended: the capabilities say so and every other route answers 503.
//
// Invariants
//   - No session exists whose view, identity or network is not as asked for.
//   - Sessions are bounded in number and in what they write; a deleted one leaves
//     neither processes nor files.
//   - The server inside is spoken to with bounded answers; its end is the session's.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	isolatedPrefix  = "/v1/isolated"
	isolatedLimit   = 64
	isolatedStart   = 15 * time.Second
	isolatedVersion = "1"
	isolatedAnswer  = 64 << 10
)

// Isolation is the table of isolated sessions.
type Isolation struct {
	commands *Commands
	program  string // ourselves
	root     string // below it is what sessions write
	pid1     bool   // init duties

	probe   sync.Once
	missing string // why there is no isolation; "": there is

	mutex    sync.Mutex
	byID     map[string]*isolated
	starting int
}

// isolated is one session; what follows helper is guarded by the mutex of Isolation.
type isolated struct {
	id      string
	request *isolatedRequest
	created time.Time
	scratch string
	helper  *helper

	used   time.Time // the last run's begin or end
	active int       // requests under way
	runs   map[string]time.Time
	timer  *time.Timer
}

// NewIsolation looks at nothing yet.
func NewIsolation(commands *Commands, program, root string, pid1 bool) *Isolation {
	return &Isolation{commands: commands, program: program, root: root, pid1: pid1, byID: map[string]*isolated{}}
}

// unavailable says why there is no isolation, by having tried it; "" if there is.
func (i *Isolation) unavailable() string {
	i.probe.Do(func() {
		if !i.commands.reaper.admin {
			i.missing = "this sandbox may not mount: isolated sessions need CAP_SYS_ADMIN inside it"
			return
		}
		if err := i.prepare(); err != nil {
			i.missing = err.Error()
			return
		}
		scratch, err := os.MkdirTemp(i.root, "probe-")
		if err == nil {
			defer os.RemoveAll(scratch)
			plan := &viewPlan{Root: i.root, Scratch: scratch, PrivateTmp: true, Directory: "/", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
			var probe *helper
			request := isolatedRequest{}
			if probe, err = i.start(plan, request.namespaces()); err == nil {
				probe.end()
			}
		}
		if err != nil {
			i.missing = "isolated sessions do not work here: " + err.Error()
		}
	})
	return i.missing
}

// prepare makes the directory of sessions and removes what an earlier daemon left there.
func (i *Isolation) prepare() error {
	if err := os.MkdirAll(i.root, 0o711); err != nil {
		return err
	}
	entries, err := os.ReadDir(i.root)
	for _, entry := range entries {
		_ = os.RemoveAll(filepath.Join(i.root, entry.Name()))
	}
	return err
}

func (i *Isolation) route(method, path string) http.HandlerFunc {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	switch {
	case method == http.MethodGet && path == "/capabilities":
		return i.capabilities
	case method == http.MethodPost && path == "/session":
		return i.available(i.create)
	case method == http.MethodGet && path == "/sessions":
		return i.available(i.list)
	case len(parts) < 2 || parts[0] != "session":
		return nil
	case len(parts) == 2 && method == http.MethodGet:
		return i.available(func(w http.ResponseWriter, _ *http.Request) { i.get(w, parts[1]) })
	case len(parts) == 2 && method == http.MethodDelete:
		return i.available(func(w http.ResponseWriter, _ *http.Request) { i.delete(w, parts[1]) })
	case len(parts) == 3 && (parts[2] == "diff" && method == http.MethodGet || parts[2] == "commit" && method == http.MethodPost):
		return func(w http.ResponseWriter, _ *http.Request) {
			writeError(w, notSupported("diff and commit are not supported"))
		}
	case len(parts) < 3 || !isolatedRoute(method, parts[2:]):
		return nil
	}
	return i.available(func(w http.ResponseWriter, r *http.Request) { i.forward(w, r, parts[1], parts[2:]) })
}

// isolatedRoute tells whether the server of a session has a route.
func isolatedRoute(method string, parts []string) bool {
	switch {
	case parts[0] == "run":
		return method == http.MethodPost && len(parts) == 1
	case parts[0] == "runs":
		return method == http.MethodGet && (len(parts) == 2 || len(parts) == 3 && parts[2] == "logs")
	}
	return (&Files{}).route(method, "/"+strings.Join(parts, "/")) != nil
}

// available answers 503 where there is no isolation.
func (i *Isolation) available(handler http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if why := i.unavailable(); why != "" {
			writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, why})
			return
		}
		handler(w, r)
	}
}

func (i *Isolation) capabilities(w http.ResponseWriter, _ *http.Request) {
	why := i.unavailable()
	answer := map[string]any{
		"available": why == "", "isolator": "execd", "version": isolatedVersion, "setpriv_available": why == "",
		"userns_available": false, "commit_supported": false, "diff_supported": false, "hardening": i.hardening(),
	}
	if why != "" {
		answer["message"] = why
	}
	writeJSON(w, http.StatusOK, answer)
}

// hardening is what is in force for this process, as the kernel tells it.
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
	for line := range strings.Lines(fileText("/proc/self/status")) {
		name, value, _ := strings.Cut(line, ":")
		status[name] = strings.TrimSpace(value)
	}
	seccomp := layer("disabled", "no filter is installed for this process")
	if status["Seccomp"] == "2" {
		seccomp = layer("active", "")
	}
	caps := layer("disabled", "commands have the capabilities of this process")
	if i.commands.reaper.admin {
		caps = layer("active", "commands lack CAP_SYS_ADMIN")
	}
	return map[string]any{
		"init_mode": mode, "signal_shield": os.Getpid() == 1, "cap_drop": caps, "seccomp": seccomp,
		"landlock": layer("disabled", "not used"), "ebpf": layer("unsupported", "not used"),
	}
}

func sessionNotFound(id string) *problem {
	return &problem{http.StatusNotFound, "SESSION_NOT_FOUND", "isolated session " + id + " not found"}
}

func (i *Isolation) create(w http.ResponseWriter, r *http.Request) {
	var request isolatedRequest
	err := decodeJSON(w, r, commandBodyLimit, &request)
	var plan *viewPlan
	if err == nil {
		plan, err = request.plan(i.root)
	}
	if err == nil {
		err = request.identity(plan, i.commands)
	}
	if err == nil {
		plan.Env, err = request.environment(i.commands.env.ForCommand(nil))
	}
	var made *isolated
	if err == nil {
		made, err = i.make(&request, plan)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	answer := made.echo()
	answer["session_id"], answer["created_at"] = made.id, made.created
	writeJSON(w, http.StatusCreated, answer)
}

func (i *Isolation) make(request *isolatedRequest, plan *viewPlan) (*isolated, error) {
	i.mutex.Lock()
	full := len(i.byID)+i.starting >= isolatedLimit
	if !full {
		i.starting++
	}
	i.mutex.Unlock()
	if full {
		return nil, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many isolated sessions"}
	}
	defer func() {
		i.mutex.Lock()
		i.starting--
		i.mutex.Unlock()
	}()
	if slices.ContainsFunc(plan.Mounts, func(m viewMount) bool { return m.Kind == viewOverlay }) {
		if err := measureUppers(i.root); err != nil {
			return nil, err
		}
	}
	now := time.Now().UTC()
	made := &isolated{id: newUUID(), request: request, created: now, used: now, runs: map[string]time.Time{}}
	made.scratch = filepath.Join(i.root, made.id)
	plan.ID, plan.Scratch = made.id, made.scratch
	err := os.Mkdir(made.scratch, 0o711)
	if err == nil {
		made.helper, err = i.start(plan, request.namespaces())
	}
	if err != nil {
		os.RemoveAll(made.scratch)
		return nil, &problem{http.StatusServiceUnavailable, codeUnavailable, "the session cannot be made: " + err.Error()}
	}
	made.helper.proxy.ModifyResponse = func(response *http.Response) error { return i.note(made, response) }
	made.helper.proxy.ErrorHandler = made.broken
	i.mutex.Lock()
	i.byID[made.id] = made
	i.mutex.Unlock()
	i.watch(made)
	return made, nil
}

// start makes a view and the server in it.
func (i *Isolation) start(plan *viewPlan, namespaces uintptr) (*helper, error) {
	text, err := json.Marshal(plan)
	if err != nil {
		return nil, err
	}
	file, err := stateFile(text)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	control, err := unixConn(ours)
	if err != nil {
		theirs.Close()
		return nil, err
	}
	null, err := openNull()
	if err != nil {
		theirs.Close()
		control.Close()
		return nil, err
	}
	process, err := i.commands.reaper.Start(Spec{
		Path: i.program, Argv: []string{"execd", isolateFlag}, Dir: "/", Namespaces: namespaces,
		Files: [3]uintptr{null.Fd(), 2, 2}, Extra: map[int]uintptr{helperControl: theirs.Fd(), helperPlan: file.Fd()},
	})
	null.Close()
	theirs.Close()
	if err != nil {
		control.Close()
		return nil, err
	}
	started := newHelper(process, control, i.commands.log)
	_ = control.SetReadDeadline(time.Now().Add(isolatedStart))
	answer := make([]byte, 1024)
	n, err := control.Read(answer)
	if string(answer[:n]) != viewReady {
		started.end()
		if n > 0 {
			err = errors.New(string(bytes.ToValidUTF8(answer[:n], []byte("?"))))
		}
		if err == nil || errors.Is(err, io.EOF) {
			err = errors.New("its helper ended")
		}
		return nil, err
	}
	_ = control.SetReadDeadline(time.Time{})
	return started, nil
}

// end kills a helper; with the first process of a PID namespace go all others in it.
func (h *helper) end() {
	h.control.Close()
	h.process.SignalGroup(syscall.SIGKILL)
	<-h.process.Done
	h.idle.CloseIdleConnections()
}

// echo is the request as it was taken.
func (s *isolated) echo() map[string]any {
	r := s.request
	answer := map[string]any{"overlays": r.Overlays, "profile": text(r.Profile, "strict"), "uid_mode": text(r.UIDMode, "setpriv")}
	if len(r.Overlays) == 1 {
		answer["workspace"] = isolatedOverlay{Path: r.Overlays[0].Path, Mode: r.Overlays[0].Mode}
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

// state is what both GET routes tell; mutex held.
func (s *isolated) state() map[string]any {
	answer := map[string]any{"status": "active", "created_at": s.created, "last_run_at": s.used}
	if s.dead() {
		answer["status"] = "dead"
	} else if limit := s.idleLimit(); limit > 0 {
		answer["idle_remaining_seconds"] = int64(max(0, limit-time.Since(s.used)) / time.Second)
	}
	return answer
}

func (s *isolated) dead() bool {
	select {
	case <-s.helper.process.Done:
		return true
	default:
		return false
	}
}

func (s *isolated) idleLimit() time.Duration {
	if s.request.IdleSeconds == nil {
		return 0
	}
	return time.Duration(*s.request.IdleSeconds) * time.Second
}

func (i *Isolation) list(w http.ResponseWriter, _ *http.Request) {
	i.mutex.Lock()
	all := make([]*isolated, 0, len(i.byID))
	for _, each := range i.byID {
		all = append(all, each)
	}
	slices.SortFunc(all, func(a, b *isolated) int { return a.created.Compare(b.created) })
	sessions := make([]map[string]any, len(all))
	for n, each := range all {
		sessions[n] = each.state()
		sessions[n]["session_id"] = each.id
	}
	i.mutex.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"sessions": sessions})
}

func (i *Isolation) find(id string) (*isolated, error) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if found := i.byID[id]; found != nil {
		return found, nil
	}
	return nil, sessionNotFound(id)
}

func (i *Isolation) get(w http.ResponseWriter, id string) {
	found, err := i.find(id)
	if err != nil {
		writeError(w, err)
		return
	}
	answer := found.echo()
	i.mutex.Lock()
	for name, value := range found.state() {
		answer[name] = value
	}
	i.mutex.Unlock()
	writeJSON(w, http.StatusOK, answer)
}

func (i *Isolation) delete(w http.ResponseWriter, id string) {
	if !i.remove(id) {
		writeError(w, sessionNotFound(id))
		return
	}
	writeEmpty(w)
}

// remove ends a session and takes away what it wrote.
func (i *Isolation) remove(id string) bool {
	i.mutex.Lock()
	removed := i.byID[id]
	delete(i.byID, id)
	if removed != nil && removed.timer != nil {
		removed.timer.Stop()
	}
	i.mutex.Unlock()
	if removed == nil {
		return false
	}
	removed.helper.end()
	if err := os.RemoveAll(removed.scratch); err != nil {
		i.commands.log.Printf("an isolated session left files: %v", reason(err))
	}
	return true
}

// endAll removes every session.
func (i *Isolation) endAll() {
	i.mutex.Lock()
	ids := make([]string, 0, len(i.byID))
	for id := range i.byID {
		ids = append(ids, id)
	}
	i.mutex.Unlock()
	for _, id := range ids {
		i.remove(id)
	}
}

// watch removes a session that has been idle for as long as it may be.
func (i *Isolation) watch(watched *isolated) {
	limit := watched.idleLimit()
	if limit == 0 {
		return
	}
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if i.byID[watched.id] != watched {
		return
	}
	left := limit - time.Since(watched.used)
	if left <= 0 && watched.active > 0 {
		left = time.Second
	}
	if left > 0 {
		watched.timer = time.AfterFunc(left, func() { i.watch(watched) })
		return
	}
	go func() {
		if watched.busy() {
			i.touch(watched, 0)
			i.watch(watched)
			return
		}
		i.remove(watched.id)
	}()
}

// busy asks the server inside whether a background run goes on.
func (s *isolated) busy() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://helper/busy", nil)
	if err != nil {
		return false
	}
	response, err := s.helper.idle.RoundTrip(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	var answer struct{ Busy bool }
	return json.NewDecoder(io.LimitReader(response.Body, isolatedAnswer)).Decode(&answer) == nil && answer.Busy
}

// touch notes use, and a change of the number of requests under way.
func (i *Isolation) touch(touched *isolated, change int) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	touched.used = time.Now().UTC()
	touched.active += change
}

// forward passes a request on to the server of a session.
func (i *Isolation) forward(w http.ResponseWriter, r *http.Request, id string, parts []string) {
	found, err := i.find(id)
	if err != nil {
		writeError(w, err)
		return
	}
	if parts[0] == "runs" && found.dead() {
		i.statusOfDead(w, found, parts)
		return
	}
	if parts[0] == "run" {
		i.touch(found, 1)
		defer i.touch(found, -1)
	}
	found.helper.forward(w, r, "/"+strings.Join(parts, "/"))
}

// note remembers background runs, so that they can be told of when the session has died.
func (i *Isolation) note(noted *isolated, response *http.Response) error {
	if response.StatusCode != http.StatusAccepted {
		return nil
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, isolatedAnswer))
	response.Body.Close()
	var started map[string]any
	if err == nil {
		err = json.Unmarshal(body, &started)
	}
	id, ok := started["run_id"].(string)
	if err != nil || !ok {
		return errors.New("not an answer")
	}
	i.mutex.Lock()
	if len(noted.runs) < isolatedRuns {
		noted.runs[id] = time.Now().UTC()
	}
	i.mutex.Unlock()
	if body, err = json.Marshal(started); err != nil {
		return err
	}
	response.Body = io.NopCloser(bytes.NewReader(body))
	response.ContentLength = int64(len(body))
	response.Header.Set("Content-Length", strconv.Itoa(len(body)))
	return nil
}

func (i *Isolation) statusOfDead(w http.ResponseWriter, dead *isolated, parts []string) {
	i.mutex.Lock()
	started, known := dead.runs[parts[1]]
	i.mutex.Unlock()
	switch {
	case !known:
		writeError(w, &problem{http.StatusNotFound, "RUN_NOT_FOUND", "run " + parts[1] + " not found"})
	case len(parts) == 3:
		writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, "the session's log ended with it"})
	default:
		writeJSON(w, http.StatusOK, isolatedRunStatus{
			SessionID: dead.id, RunID: parts[1], Error: "session terminated", StartedAt: started,
		})
	}
}

// broken answers when the server inside does not.
func (s *isolated) broken(w http.ResponseWriter, r *http.Request, _ error) {
	if r.URL.Path != "/run" {
		writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, "the session's process has exited"})
		return
	}
	stream := newEventStream(w)
	stream.begin(newUUID())
	stream.fail("IsolatedError", "session process has exited", []string{})
}

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// former is a daemon with what its owner left in it.
type former struct {
	*fixture
	dial    func() net.Conn
	address string
}

func newFormer(t *testing.T) *former {
	f := newFixture(t)
	f.server.binding.enabled, f.server.binding.bound = true, true
	dial := f.serve()
	return &former{f, dial, dial().RemoteAddr().String()}
}

// handOver makes somebody else the owner.
func (f *former) handOver(preserve bool) {
	f.t.Helper()
	began := time.Now()
	status, body := initialised(f.t, f.address, testToken, "fresh", preserve)
	equal(f.t, `200 {"generation":1,"sandboxId":"next"}`, fmt.Sprint(status, " ", body))
	if took := time.Since(began); took > 15*time.Second {
		f.t.Errorf("the init took %s", took)
	}
}

func (f *former) made(path, body, key string) string {
	f.t.Helper()
	status, answer := f.call("POST", path, body)
	var decoded map[string]string
	if err := json.Unmarshal([]byte(answer), &decoded); err != nil || status >= 300 {
		f.t.Fatal(status, answer)
	}
	return decoded[key]
}

// fresh is the status that the new owner gets.
func (f *former) fresh(method, path string) int {
	f.t.Helper()
	status, _ := f.call(method, path, "", tokenHeader, "fresh")
	return status
}

func TestAnInitForgetsCommandsSessionsAndTerminals(t *testing.T) {
	for _, preserve := range []bool{false, true} { // that it is kept otherwise is the control
		f := newFormer(t)
		finished := f.run(object{"command": "echo secret"}).id
		background := f.run(object{"command": "echo secret", "background": true}).id
		pid := t.TempDir() + "/pid"
		running := f.run(object{"command": "echo $$ >" + pid + "; exec sleep 60", "background": true}).id
		session := f.made("/session", "{}", "session_id")
		terminal := f.made("/pty", "{}", "session_id")
		group := 0
		eventually(t, "the command has begun", func() bool { group, _ = strconv.Atoi(fileText(pid)); return group > 1 })
		f.ended(background)
		f.handOver(preserve)
		expected := map[bool]int{true: 200, false: 404}[preserve]
		for _, path := range []string{
			"/command/status/" + finished, "/command/status/" + background, "/command/" + background + "/logs", "/command/status/" + running,
			"/pty/" + terminal,
		} {
			equal(t, path+fmt.Sprint(expected), path+fmt.Sprint(f.fresh("GET", path)))
		}
		equal(t, preserve, syscall.Kill(-group, 0) == nil)
		equal(t, expected, f.fresh("DELETE", "/session/"+session))
		_ = syscall.Kill(-group, syscall.SIGKILL)
	}
}

func TestAnInitEndsRequestsOfTheFormerOwner(t *testing.T) {
	f := newFormer(t)
	marker := filepath.Join(t.TempDir(), "marker")
	command := `{"command":"touch ` + marker + `"}`
	slow := f.dial()
	fmt.Fprintf(slow, "POST /command HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s",
		tokenHeader, testToken, len(command), command[:9])
	watching := f.dial()
	fmt.Fprintf(watching, "GET /metrics/watch HTTP/1.1\r\nHost: x\r\n%s: %s\r\n\r\n", tokenHeader, testToken)
	foreground := f.dial()
	waits := `{"command":"sleep 60"}`
	fmt.Fprintf(foreground, "POST /command HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s", tokenHeader, testToken, len(waits), waits)
	tunnelled := make(chan error, 1)
	port := rawService(t, func(connection net.Conn, reader *bufio.Reader) {
		_, _ = readHead(reader)
		io.WriteString(connection, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n")
		_, err := io.Copy(io.Discard, reader)
		tunnelled <- err
	})
	tunnel := f.dial()
	fmt.Fprintf(tunnel, "GET /proxy/%s/ HTTP/1.1\r\nHost: x\r\n%s: %s\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n", port, tokenHeader, testToken)
	for _, connection := range []net.Conn{watching, foreground, tunnel} {
		_ = connection.SetDeadline(time.Now().Add(20 * time.Second))
		_, err := connection.Read(make([]byte, 1))
		equal(t, nil, err)
	}
	eventually(t, "all are being served", func() bool { return f.server.binding.requests.Load() == 4 })
	f.handOver(false)
	equal(t, int64(0), f.server.binding.requests.Load())
	_, _ = io.WriteString(slow, command[9:])
	for _, connection := range []net.Conn{slow, watching, foreground, tunnel} {
		_ = connection.SetDeadline(time.Now().Add(20 * time.Second))
		_, _ = io.Copy(io.Discard, connection) // each ends
	}
	select {
	case <-tunnelled:
	case <-time.After(10 * time.Second):
		t.Error("a tunnel goes on")
	}
	_, err := os.Stat(marker)
	equal(t, true, os.IsNotExist(err))
}

// While it ends what was there, an init lets nobody in, with either token.
func TestAnInitServesNobodyBeforeItHasEnded(t *testing.T) {
	f := newFormer(t)
	held := make(chan struct{})
	port := rawService(t, func(connection net.Conn, reader *bufio.Reader) { <-held })
	defer close(held)
	f.server.binding.requests.Add(1) // a request that takes its time
	var waiting sync.WaitGroup
	waiting.Go(func() { f.handOver(false) })
	eventually(t, "it is under way", func() bool {
		f.server.binding.mutex.RLock()
		defer f.server.binding.mutex.RUnlock()
		return f.server.binding.ending
	})
	for _, token := range []string{testToken, "fresh", ""} {
		for _, path := range []string{"/metrics", "/ready", "/proxy/" + port + "/"} {
			status, _ := f.call("GET", path, "", tokenHeader, token)
			equal(t, token+path+"503", token+path+fmt.Sprint(status))
		}
	}
	f.server.binding.requests.Add(-1)
	waiting.Wait()
	equal(t, 200, f.fresh("GET", "/metrics"))
}

func TestAnInitEndsPeriodicHooks(t *testing.T) {
	f := newFormer(t)
	file := filepath.Join(t.TempDir(), "pid")
	lifecycle, err := parseLifecycle([]byte(`{"periodic":[{"name":"a","schedule":"@every 1s","command":["sh","-c","echo $$ >` + file + `; sleep 60"]}]}`))
	equal(t, nil, err)
	equal(t, nil, f.server.hooks.begin(lifecycle))
	eventually(t, "it runs", func() bool { return fileText(file) != "" })
	f.handOver(false)
	equal(t, true, f.server.hooks.ended())
	var pid int
	_, _ = fmt.Sscan(fileText(file), &pid)
	equal(t, true, pid > 1 && syscall.Kill(pid, 0) != nil)
}

// The EXECD_ENVS file has the content again that it had when the daemon started.
func TestAnInitTakesBackWhatWasPutIntoTheEnvironmentFile(t *testing.T) {
	for name, change := range map[string]func(path, directory string) error{
		"written": func(path, _ string) error { return os.WriteFile(path, []byte("LEFT=former\n"), 0o600) },
		"a link": func(path, directory string) error {
			if err := os.WriteFile(directory+"/other", []byte("LEFT=former\n"), 0o600); err != nil {
				return err
			}
			return os.Symlink(directory+"/other", path)
		},
		"a FIFO": func(path, _ string) error { return syscall.Mkfifo(path, 0o600) },
	} {
		for _, preserve := range []bool{false, true} {
			f := newFormer(t)
			directory := t.TempDir()
			equal(t, nil, change(f.envFile, directory))
			f.handOver(preserve)
			_, body := f.call("POST", "/command", `{"command":"echo ${LEFT-clean}"}`, tokenHeader, "fresh")
			left := "clean"
			if preserve && name != "a FIFO" {
				left = "former"
			}
			if !strings.Contains(body, `"`+left+`\n"`) {
				t.Errorf("%s, preserved %t: %s", name, preserve, body)
			}
			if name == "a link" {
				equal(t, "LEFT=former\n", mustRead(t, directory+"/other"))
			}
		}
	}
}

func TestAnInitEndsHelpersOfIdentities(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	f := newFormer(t)
	status, _ := f.call("GET", "/v1/filesystem/1234/1234/files/info?path=/", "")
	equal(t, http.StatusOK, status)
	helpers := func() (pids []int) {
		for pid, line := range children(t) {
			if strings.HasSuffix(line, " "+helperFlag) && strings.Contains(mustRead(t, fmt.Sprintf("/proc/%d/status", pid)), "Uid:\t1234\t") {
				pids = append(pids, pid)
			}
		}
		return pids
	}
	equal(t, 1, len(helpers()))
	f.handOver(false)
	equal(t, 0, len(helpers()))
	equal(t, http.StatusOK, f.fresh("GET", "/v1/filesystem/1234/1234/files/info?path=/"))
}

// initialised hands the daemon over.
func initialised(t *testing.T, address, token, next string, preserve bool) (int, string) {
	t.Helper()
	body := fmt.Sprintf(`{"sandboxId":"next","generation":1,"accessTokenHash":"sha256:%s","preserveRuntimeState":%t}`, hashToken(next), preserve)
	request, err := http.NewRequest("POST", "http://"+address+"/internal/init", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(tokenHeader, token)
	response, err := (&http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	return response.StatusCode, string(text)
}

func TestAnInitEndsContextsKernelsAndWhatIsBeingMade(t *testing.T) {
	k := newKernelsServer(t)
	f := fixtureOf(t, k.url)
	f.server.binding.enabled, f.server.binding.bound = true, true
	dial := f.serve()
	address := dial().RemoteAddr().String()
	go func() { k.leave <- struct{}{}; k.leave <- struct{}{} }()
	f.call("POST", "/code/context", `{"language":"bash"}`)
	f.call("POST", "/code", `{"code":"1","context":{"language":"python"}}`)
	k.mutex.Lock()
	k.paths["orphan"] = "of nobody"
	k.mutex.Unlock()
	<-k.entered
	<-k.entered
	under := dial()
	body := `{"language":"python"}`
	fmt.Fprintf(under, "POST /code/context HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s", tokenHeader, testToken, len(body), body)
	<-k.entered
	time.AfterFunc(100*time.Millisecond, func() { close(k.leave) })
	status, answer := initialised(t, address, testToken, "fresh", false)
	equal(t, `200 {"generation":1,"sandboxId":"next"}`, fmt.Sprint(status, " ", answer))
	equal(t, 0, k.count())
	_, all := f.call("GET", "/code/contexts", "", tokenHeader, "fresh")
	equal(t, "[]", all)

	status, _ = f.call("POST", "/code/context", `{"language":"javascript"}`, tokenHeader, "fresh") // its kernel is not reseeded
	equal(t, 200, status)
	status, _ = initialised(t, address, "fresh", "third", true)
	equal(t, 200, status)
	equal(t, 1, k.count())
}

// A run goes on when its client leaves, but not when the owner changes.
func TestAnInitEndsARunOfCode(t *testing.T) {
	s := newScriptedServer(t, "signal")
	close(s.starting)
	f := fixtureOf(t, s.url)
	made, _ := f.call("POST", "/code/context", `{"language":"python"}`)
	equal(t, 200, made)
	f.server.binding.enabled, f.server.binding.bound = true, true
	rest := f.code()
	<-s.requests
	status, body := initialised(t, f.serve()().RemoteAddr().String(), testToken, "fresh", false)
	equal(t, `200 {"generation":1,"sandboxId":"next"}`, fmt.Sprint(status, " ", body))
	rest()
	status, body = f.call("GET", "/code/contexts", "", tokenHeader, "fresh")
	equal(t, "200 []", fmt.Sprint(status, " ", body))
}

// A server that does not end its kernels fails the init: the former owner stays.
func TestAnInitThatCannotEndAKernelIsRefused(t *testing.T) {
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodDelete:
			<-release
		case r.URL.Path == "/api/kernelspecs":
			_, _ = w.Write([]byte(`{"kernelspecs":{"p":{"spec":{"language":"python"}}}}`))
		default:
			_, _ = w.Write([]byte(`{"id":"session","kernel":{"id":"kernel"}}`))
		}
	}))
	defer server.Close()
	defer close(release)
	f := fixtureOf(t, server.URL)
	f.server.binding.enabled, f.server.binding.bound, f.server.endLimit = true, true, 300*time.Millisecond
	status, _ := f.call("POST", "/code/context", `{"language":"python"}`)
	equal(t, 200, status)
	address := f.serve()().RemoteAddr().String()
	status, _ = initialised(t, address, testToken, "fresh", false)
	equal(t, 500, status)
	status, _ = f.call("GET", "/metrics", "", tokenHeader, "fresh")
	equal(t, 401, status)
	status, _ = f.call("GET", "/metrics", "")
	equal(t, 200, status)
}

func TestAnInitEndsIsolatedSessions(t *testing.T) {
	f := newFormer(t)
	path, _ := f.isolate(object{"workspace": object{"path": workspace(t)}})
	equal(t, []string{"here"}, f.runAt(path+"/run", object{"code": "echo here"}).stdout)
	f.handOver(false)
	equal(t, http.StatusNotFound, f.fresh("GET", path))
	left, err := os.ReadDir(f.isolationRoot)
	equal(t, nil, err)
	equal(t, 0, len(left))
}

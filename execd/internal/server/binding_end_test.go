package server

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

	"sallyport.dev/execd/internal/files"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/supervise"
	"sallyport.dev/execd/internal/sys"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

// former is a daemon with the state of a former owner.
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

// handOver binds the daemon to another owner.
func (f *former) handOver(preserve bool) {
	f.T.Helper()
	began := time.Now()
	status, body := initialised(f.T, f.address, testkit.Token, "fresh", preserve)
	testkit.Equal(f.T, `200 {"generation":1,"sandboxId":"next"}`, fmt.Sprint(status, " ", body))
	if took := time.Since(began); took > 15*time.Second {
		f.T.Errorf("the init took %s", took)
	}
}

func (f *former) made(path, body, key string) string {
	f.T.Helper()
	status, answer := f.Call("POST", path, body)
	var decoded map[string]string
	if err := json.Unmarshal([]byte(answer), &decoded); err != nil || status >= 300 {
		f.T.Fatal(status, answer)
	}
	return decoded[key]
}

// fresh sends a request with the token of the new owner and returns the status.
func (f *former) fresh(method, path string) int {
	f.T.Helper()
	status, _ := f.Call(method, path, "", httpx.TokenHeader, "fresh")
	return status
}

func TestAnInitForgetsCommandsSessionsAndTerminals(t *testing.T) {
	for _, preserve := range []bool{false, true} { // the control preserves the state
		f := newFormer(t)
		finished := f.Run(testkit.Object{"command": "echo secret"}).ID
		background := f.Run(testkit.Object{"command": "echo secret", "background": true}).ID
		pid := t.TempDir() + "/pid"
		running := f.Run(testkit.Object{"command": "echo $$ >" + pid + "; exec sleep 60", "background": true}).ID
		session := f.made("/session", "{}", "session_id")
		terminal := f.made("/pty", "{}", "session_id")
		group := 0
		testkit.Eventually(t, "the command has begun", func() bool { group, _ = strconv.Atoi(sys.FileText(pid)); return group > 1 })
		f.Ended(background)
		f.handOver(preserve)
		expected := map[bool]int{true: 200, false: 404}[preserve]
		for _, path := range []string{
			"/command/status/" + finished, "/command/status/" + background, "/command/" + background + "/logs", "/command/status/" + running,
			"/pty/" + terminal,
		} {
			testkit.Equal(t, path+fmt.Sprint(expected), path+fmt.Sprint(f.fresh("GET", path)))
		}
		testkit.Equal(t, preserve, syscall.Kill(-group, 0) == nil)
		testkit.Equal(t, expected, f.fresh("DELETE", "/session/"+session))
		_ = syscall.Kill(-group, syscall.SIGKILL)
	}
}

func TestAnInitEndsRequestsOfTheFormerOwner(t *testing.T) {
	f := newFormer(t)
	marker := filepath.Join(t.TempDir(), "marker")
	command := `{"command":"touch ` + marker + `"}`
	slow := f.dial()
	fmt.Fprintf(slow, "POST /command HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s",
		httpx.TokenHeader, testkit.Token, len(command), command[:9])
	watching := f.dial()
	fmt.Fprintf(watching, "GET /metrics/watch HTTP/1.1\r\nHost: x\r\n%s: %s\r\n\r\n", httpx.TokenHeader, testkit.Token)
	foreground := f.dial()
	waits := `{"command":"sleep 60"}`
	fmt.Fprintf(foreground, "POST /command HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s", httpx.TokenHeader, testkit.Token, len(waits), waits)
	tunnelled := make(chan error, 1)
	port := rawService(t, func(connection net.Conn, reader *bufio.Reader) {
		_, _ = readHead(reader)
		io.WriteString(connection, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n")
		_, err := io.Copy(io.Discard, reader)
		tunnelled <- err
	})
	tunnel := f.dial()
	fmt.Fprintf(tunnel, "GET /proxy/%s/ HTTP/1.1\r\nHost: x\r\n%s: %s\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n", port, httpx.TokenHeader, testkit.Token)
	for _, connection := range []net.Conn{watching, foreground, tunnel} {
		_ = connection.SetDeadline(time.Now().Add(20 * time.Second))
		_, err := connection.Read(make([]byte, 1))
		testkit.Equal(t, nil, err)
	}
	testkit.Eventually(t, "all are being served", func() bool { return f.server.binding.requests.Load() == 4 })
	f.handOver(false)
	testkit.Equal(t, int64(0), f.server.binding.requests.Load())
	_, _ = io.WriteString(slow, command[9:])
	for _, connection := range []net.Conn{slow, watching, foreground, tunnel} {
		_ = connection.SetDeadline(time.Now().Add(20 * time.Second))
		_, _ = io.Copy(io.Discard, connection) // wait for its end
	}
	select {
	case <-tunnelled:
	case <-time.After(10 * time.Second):
		t.Error("a tunnel goes on")
	}
	_, err := os.Stat(marker)
	testkit.Equal(t, true, os.IsNotExist(err))
}

// While an init ends the former owner's processes, neither token is accepted.
func TestAnInitServesNoRequestBeforeItHasEnded(t *testing.T) {
	f := newFormer(t)
	held := make(chan struct{})
	port := rawService(t, func(connection net.Conn, reader *bufio.Reader) { <-held })
	defer close(held)
	f.server.binding.requests.Add(1) // a request that has not ended
	var waiting sync.WaitGroup
	waiting.Go(func() { f.handOver(false) })
	testkit.Eventually(t, "it is under way", func() bool {
		f.server.binding.mutex.RLock()
		defer f.server.binding.mutex.RUnlock()
		return f.server.binding.ending
	})
	for _, token := range []string{testkit.Token, "fresh", ""} {
		for _, path := range []string{"/metrics", "/ready", "/proxy/" + port + "/"} {
			status, _ := f.Call("GET", path, "", httpx.TokenHeader, token)
			testkit.Equal(t, token+path+"503", token+path+fmt.Sprint(status))
		}
	}
	f.server.binding.requests.Add(-1)
	waiting.Wait()
	testkit.Equal(t, 200, f.fresh("GET", "/metrics"))
}

func TestAnInitEndsPeriodicHooks(t *testing.T) {
	f := newFormer(t)
	file := filepath.Join(t.TempDir(), "pid")
	lifecycle, err := supervise.ParseLifecycle([]byte(`{"periodic":[{"name":"a","schedule":"@every 1s","command":["sh","-c","echo $$ >` + file + `; sleep 60"]}]}`))
	testkit.Equal(t, nil, err)
	testkit.Equal(t, nil, f.server.hooks.Begin(lifecycle))
	testkit.Eventually(t, "it runs", func() bool { return sys.FileText(file) != "" })
	f.handOver(false)
	testkit.Equal(t, true, f.server.hooks.Ended())
	var pid int
	_, _ = fmt.Sscan(sys.FileText(file), &pid)
	testkit.Equal(t, true, pid > 1 && syscall.Kill(pid, 0) != nil)
}

// After the init the EXECD_ENVS file has the content that it had when the daemon started.
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
			testkit.Equal(t, nil, change(f.envFile, directory))
			f.handOver(preserve)
			_, body := f.Call("POST", "/command", `{"command":"echo ${LEFT-clean}"}`, httpx.TokenHeader, "fresh")
			left := "clean"
			if preserve && name != "a FIFO" {
				left = "former"
			}
			if !strings.Contains(body, `"`+left+`\n"`) {
				t.Errorf("%s, preserved %t: %s", name, preserve, body)
			}
			if name == "a link" {
				testkit.Equal(t, "LEFT=former\n", testkit.MustRead(t, directory+"/other"))
			}
		}
	}
}

func TestAnInitEndsHelpersOfIdentities(t *testing.T) {
	f := newFormer(t)
	helpers := func() (pids []int) {
		for pid, line := range testhost.Children(t) {
			if strings.HasSuffix(line, " "+files.HelperFlag) && strings.Contains(testkit.MustRead(t, fmt.Sprintf("/proc/%d/status", pid)), "Uid:\t1234\t") {
				pids = append(pids, pid)
			}
		}
		return pids
	}
	others := len(helpers()) // of other tests
	status, _ := f.Call("GET", "/v1/filesystem/1234/1234/files/info?path=/", "")
	testkit.Equal(t, http.StatusOK, status)
	testkit.Equal(t, others+1, len(helpers()))
	f.handOver(false)
	testkit.Equal(t, others, len(helpers()))
	testkit.Equal(t, http.StatusOK, f.fresh("GET", "/v1/filesystem/1234/1234/files/info?path=/"))
}

// initialised sends an init and returns status and body of the answer.
func initialised(t *testing.T, address, token, next string, preserve bool) (int, string) {
	t.Helper()
	body := fmt.Sprintf(`{"sandboxId":"next","generation":1,"accessTokenHash":"sha256:%s","preserveRuntimeState":%t}`, HashToken(next), preserve)
	request, err := http.NewRequest("POST", "http://"+address+"/internal/init", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(httpx.TokenHeader, token)
	response, err := (&http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	return response.StatusCode, string(text)
}

func TestAnInitEndsContextsKernelsAndWhatIsBeingMade(t *testing.T) {
	k := testkit.NewKernels(t)
	f := fixtureOf(t, k.URL)
	f.server.binding.enabled, f.server.binding.bound = true, true
	dial := f.serve()
	address := dial().RemoteAddr().String()
	go func() { k.Leave <- struct{}{}; k.Leave <- struct{}{} }()
	f.Call("POST", "/code/context", `{"language":"bash"}`)
	f.Call("POST", "/code", `{"code":"1","context":{"language":"python"}}`)
	k.Mutex.Lock()
	k.Paths["orphan"] = "of no notebook"
	k.Mutex.Unlock()
	<-k.Entered
	<-k.Entered
	under := dial()
	body := `{"language":"python"}`
	fmt.Fprintf(under, "POST /code/context HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s", httpx.TokenHeader, testkit.Token, len(body), body)
	<-k.Entered
	time.AfterFunc(100*time.Millisecond, func() { close(k.Leave) })
	status, answer := initialised(t, address, testkit.Token, "fresh", false)
	testkit.Equal(t, `200 {"generation":1,"sandboxId":"next"}`, fmt.Sprint(status, " ", answer))
	testkit.Equal(t, 0, k.Count())
	_, all := f.Call("GET", "/code/contexts", "", httpx.TokenHeader, "fresh")
	testkit.Equal(t, "[]", all)

	// The kernel of a JavaScript context is not reseeded.
	status, _ = f.Call("POST", "/code/context", `{"language":"javascript"}`, httpx.TokenHeader, "fresh")
	testkit.Equal(t, 200, status)
	status, _ = initialised(t, address, "fresh", "third", true)
	testkit.Equal(t, 200, status)
	testkit.Equal(t, 1, k.Count())
}

// A run continues when its client leaves, but ends when the owner changes.
func TestAnInitEndsARunOfCode(t *testing.T) {
	s := testkit.NewScripted(t, "signal")
	close(s.Starting)
	f := fixtureOf(t, s.URL)
	made, _ := f.Call("POST", "/code/context", `{"language":"python"}`)
	testkit.Equal(t, 200, made)
	f.server.binding.enabled, f.server.binding.bound = true, true
	rest := f.Code()
	<-s.Requests
	status, body := initialised(t, f.serve()().RemoteAddr().String(), testkit.Token, "fresh", false)
	testkit.Equal(t, `200 {"generation":1,"sandboxId":"next"}`, fmt.Sprint(status, " ", body))
	rest()
	status, body = f.Call("GET", "/code/contexts", "", httpx.TokenHeader, "fresh")
	testkit.Equal(t, "200 []", fmt.Sprint(status, " ", body))
}

// If the Jupyter server does not end its kernels, the init fails and the former owner stays.
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
	status, _ := f.Call("POST", "/code/context", `{"language":"python"}`)
	testkit.Equal(t, 200, status)
	address := f.serve()().RemoteAddr().String()
	status, _ = initialised(t, address, testkit.Token, "fresh", false)
	testkit.Equal(t, 500, status)
	status, _ = f.Call("GET", "/metrics", "", httpx.TokenHeader, "fresh")
	testkit.Equal(t, 401, status)
	status, _ = f.Call("GET", "/metrics", "")
	testkit.Equal(t, 200, status)
}

func TestAnInitEndsIsolatedSessions(t *testing.T) {
	f := newFormer(t)
	path, _ := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t)}})
	testkit.Equal(t, []string{"here"}, f.RunAt(path+"/run", testkit.Object{"code": "echo here"}).Stdout)
	f.handOver(false)
	testkit.Equal(t, http.StatusNotFound, f.fresh("GET", path))
	left, err := os.ReadDir(f.isolationRoot)
	testkit.Equal(t, nil, err)
	testkit.Equal(t, 0, len(left))
}

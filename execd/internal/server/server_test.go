package server

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/sys"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

func TestOnlyPingIsOpen(t *testing.T) {
	f := newFixture(t)
	for path, expected := range map[string]int{
		"/ping": 200, "/proxy/44772/ping": 200, "/proxy/44772/proxy/44772/ping": 200, "/": 401, "/nothing": 401, "/metrics": 401,
		"/proxy/80/ping": 401, "/proxy/44772/metrics": 401, "/ping/": 401, "//ping": 401, "/v1/filesystem/0/0/files/info": 401, "/pty/x/ws": 401, "/command/status/x": 401,
	} {
		response, err := http.Get(f.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		testkit.Equal(t, path+fmt.Sprint(expected), path+fmt.Sprint(response.StatusCode))
		testkit.Equal(t, expected == 401, strings.Contains(string(body), "Unauthorized"))
	}
	for _, token := range []string{"", "wrong", testkit.Token + " x"} {
		status, _ := f.Call("GET", "/metrics", "", httpx.TokenHeader, token)
		testkit.Equal(t, 401, status)
	}
}

func TestNoConfigurationMeansRefusal(t *testing.T) {
	var zero Auth
	testkit.Equal(t, false, zero.Allows(&http.Request{Header: http.Header{}}))
	_, err := NewAuth("", false)
	testkit.Equal(t, errNoToken.Error(), err.Error())
	_, err = NewAuth("abcd", false)
	testkit.Equal(t, true, err != nil)
}

func TestUnassignedRoutesAreNotFoundAndNeverRedirect(t *testing.T) {
	f := newFixture(t)
	for _, route := range []string{"GET /nothing", "POST /ping", "OPTIONS /files/info", "PUT /files", "GET /command/x/y/z", "GET /a/../ping"} {
		method, path, _ := strings.Cut(route, " ")
		status, body := f.Call(method, path, "")
		testkit.Equal(t, route+"404", route+fmt.Sprint(status))
		testkit.Equal(t, "404 page not found", body)
	}
	status, _ := f.Call("GET", "/files/info/", "")
	testkit.Equal(t, 200, status)
}

func TestMetricsArePlausible(t *testing.T) {
	f := newFixture(t)
	status, body := f.Call("GET", "/metrics", "")
	testkit.Equal(t, 200, status)
	m := f.server.metrics.read()
	if m.CPUCount <= 0 || m.CPUUsed < 0 || m.CPUUsed > 100 || m.MemTotal <= 0 || m.MemUsed > m.MemTotal || m.MemUsed <= 0 {
		t.Fatalf("%+v %s", m, body)
	}
}

func TestProxyPassesRequestsThroughWithoutTheToken(t *testing.T) {
	f := newFixture(t)
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			connection, both, _ := w.(http.Hijacker).Hijack()
			defer connection.Close()
			io.WriteString(connection, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n")
			line, _ := both.ReadString('\n')
			io.WriteString(connection, "echo "+line)
			return
		}
		fmt.Fprintf(w, "%s %s %s %q %s", r.Method, r.RequestURI, r.Host, r.Header.Values(httpx.TokenHeader), r.Header.Get("X-Forwarded-For"))
	}))
	t.Cleanup(service.Close)
	_, port, _ := net.SplitHostPort(service.Listener.Addr().String())
	host := strings.TrimPrefix(f.URL, "http://")
	for path, expected := range map[string]string{"/a%2Fb/../c?x=1;y=%zz&&": "/a%2Fb/../c?x=1;y=%zz&&", "": "/", "/": "/"} {
		connection, err := net.Dial("tcp", host)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(connection, "PATCH /proxy/44772/proxy/%s%s HTTP/1.1\r\nHost: user.example\r\n%s: %s\r\nConnection: close\r\n\r\n", port, path, httpx.TokenHeader, testkit.Token)
		response, err := http.ReadResponse(bufio.NewReader(connection), nil)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		testkit.Equal(t, "PATCH "+expected+" user.example [] 127.0.0.1", string(body))
		connection.Close()
	}
	connection, _ := net.Dial("tcp", host)
	defer connection.Close()
	fmt.Fprintf(connection, "GET /proxy/%s/ws HTTP/1.1\r\nHost: x\r\n%s: %s\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n", port, httpx.TokenHeader, testkit.Token)
	reader := bufio.NewReader(connection)
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Equal(t, 101, response.StatusCode)
	fmt.Fprint(connection, "hello\n")
	line, _ := reader.ReadString('\n')
	testkit.Equal(t, "echo hello\n", line)
	for path, expected := range map[string]int{"/proxy/0/": 400, "/proxy/x": 400, "/proxy": 400, "/proxy/65536/": 400, "/proxy/+80/": 400, "/proxy/1/": 502} {
		status, _ := f.Call("GET", path, "")
		testkit.Equal(t, path+fmt.Sprint(expected), path+fmt.Sprint(status))
	}
}

func TestWhatIsPassedOnMayBeAnsweredBeforeItsEndWasSeen(t *testing.T) {
	f := newFixture(t)
	service := httptest.NewServer(http.HandlerFunc(testkit.AnswersEarly))
	t.Cleanup(service.Close)
	_, port, _ := net.SplitHostPort(service.Listener.Addr().String())
	f.HearsEarlyAnswers("/proxy/" + port + "/")
}

// serve starts the daemon's own listener, which httptest does not use. It returns a function that opens a connection.
func (f *fixture) serve() (dial func() net.Conn) {
	f.T.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		f.T.Fatal(err)
	}
	f.T.Cleanup(func() { listener.Close() })
	go f.server.Serve(listener)
	return func() net.Conn {
		connection, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			f.T.Fatal(err)
		}
		f.T.Cleanup(func() { connection.Close() })
		return connection
	}
}

// insideIs makes the server treat only connections from one address of this machine as connections from inside.
func (f *fixture) insideIs(address string) {
	f.server.connections.inside = func(connection net.Conn) bool {
		return connection.RemoteAddr().(*net.TCPAddr).IP.String() == address
	}
}

func TestConnectionsFromInsideLeaveRoomForOthers(t *testing.T) {
	f := newFixture(t)
	f.insideIs("127.0.0.2")
	outside := f.serve()
	to := outside().RemoteAddr().String()
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	inside := func() net.Conn {
		connection, err := from.Dial("tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { connection.Close() })
		return connection
	}
	answer := func(connection net.Conn) string {
		_ = connection.SetDeadline(time.Now().Add(10 * time.Second))
		io.WriteString(connection, "GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
		line, _ := bufio.NewReader(connection).ReadString('\n')
		return line
	}
	held := make([]net.Conn, insideLimit)
	for i := range held {
		held[i] = inside()
	}
	for range connectionLimit {
		testkit.Equal(t, "", answer(inside()))
	}
	testkit.Equal(t, "HTTP/1.1 200 OK\r\n", answer(held[0]))
	testkit.Equal(t, "HTTP/1.1 200 OK\r\n", answer(outside()))
	held[0].Close()
	for deadline := time.Now().Add(10 * time.Second); answer(inside()) == ""; {
		if time.Now().After(deadline) {
			t.Fatal("what was closed still counts")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestOnlyThisMachineIsInside(t *testing.T) {
	for _, pair := range []struct {
		from, to string
		expected bool
	}{{"127.0.0.9", "127.0.0.1", true}, {"10.0.0.2", "10.0.0.2", true}, {"10.0.0.1", "10.0.0.2", false}} {
		connection := addressed{from: net.ParseIP(pair.from), to: net.ParseIP(pair.to)}
		testkit.Equal(t, pair.expected, fromInside(connection))
	}
}

// addressed is a connection that has only its two addresses.
type addressed struct {
	net.Conn
	from, to net.IP
}

func (a addressed) RemoteAddr() net.Addr { return &net.TCPAddr{IP: a.from, Port: 1} }

func (a addressed) LocalAddr() net.Addr { return &net.TCPAddr{IP: a.to, Port: 2} }

func TestConnectionsBeyondTheLimitWaitUntilOneEnds(t *testing.T) {
	f := newFixture(t)
	f.insideIs("127.0.0.2")
	dial := f.serve()
	connections := make([]net.Conn, connectionLimit)
	for i := range connections {
		connections[i] = dial()
	}
	waits := dial()
	io.WriteString(waits, "GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
	_ = waits.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	_, err := waits.Read(make([]byte, 1))
	testkit.Equal(t, true, errors.Is(err, os.ErrDeadlineExceeded))
	connections[0].Close()
	_ = waits.SetReadDeadline(time.Now().Add(10 * time.Second))
	line, _ := bufio.NewReader(waits).ReadString('\n')
	testkit.Equal(t, "HTTP/1.1 200 OK\r\n", line)
}

func TestSlowClientsAreLeft(t *testing.T) {
	f := newFixture(t)
	testkit.Shorten(t, &f.server.connections.headerLimit)
	testkit.Shorten(t, &f.server.connections.idleLimit)
	testkit.Shorten(t, &f.server.connections.bodyLimit)
	dial := f.serve()
	token := httpx.TokenHeader + ": " + testkit.Token + "\r\n"
	var waiting sync.WaitGroup
	for sent, expected := range map[string]string{
		"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n":                                                                                                     "HTTP/1.1 200 ",
		"GET /ping HTTP/1.1\r\nHo":                                                                                                                  "",
		"POST /command HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{":                                                                           "HTTP/1.1 401 ",
		"POST /command HTTP/1.1\r\nHost: x\r\n" + token + "Content-Length: 9\r\n\r\n{":                                                              "HTTP/1.1 400 ",
		"POST /command HTTP/1.1\r\nHost: x\r\n" + token + "Content-Length: 9\r\n\r\n{]":                                                             "HTTP/1.1 400 ",
		"PUT /no HTTP/1.1\r\nHost: x\r\n" + token + "Transfer-Encoding: chunked\r\n\r\n9\r\n":                                                       "HTTP/1.1 404 ",
		"POST /files/upload HTTP/1.1\r\nHost: x\r\n" + token + "Content-Length: 99\r\nContent-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n": "HTTP/1.1 400 ",
	} {
		connection := dial()
		io.WriteString(connection, sent)
		_ = connection.SetReadDeadline(time.Now().Add(10 * time.Second))
		waiting.Go(func() {
			answer, err := io.ReadAll(connection)
			if err != nil || !strings.HasPrefix(string(answer), expected) {
				t.Errorf("%q was answered %q %v", sent, answer, err)
			}
		})
	}
	waiting.Wait()
}

func TestAClientThatDoesNotReadDelaysNoOther(t *testing.T) {
	f := newFixture(t)
	testkit.Shorten(t, &f.server.connections.answerLimit)
	dial := f.serve()
	file := filepath.Join(t.TempDir(), "large")
	testkit.Equal(t, nil, os.WriteFile(file, nil, 0o600))
	testkit.Equal(t, nil, os.Truncate(file, 64<<20))
	ended := make(chan struct{})
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		defer close(ended)
		for _, err := w.Write(make([]byte, 1<<20)); err == nil; _, err = w.Write(make([]byte, 1<<20)) {
		}
	}))
	defer service.Close()
	_, port, _ := net.SplitHostPort(service.Listener.Addr().String())
	marker := filepath.Join(t.TempDir(), "ended")
	command := `{"command":"head -c 50000000 /dev/zero | tr '\\0' x; echo ended > ` + marker + `"}`
	for _, sent := range []string{
		"POST /command HTTP/1.1\r\nContent-Length: " + strconv.Itoa(len(command)),
		"GET /files/download?path=" + file + " HTTP/1.1",
		"GET /files/download?offset=1&path=" + file + " HTTP/1.1",
		"GET /proxy/" + port + "/ HTTP/1.1",
	} {
		connection := dial()
		io.WriteString(connection, sent+"\r\nHost: x\r\n"+httpx.TokenHeader+": "+testkit.Token+"\r\n\r\n")
		if strings.HasPrefix(sent, "POST") {
			io.WriteString(connection, command)
		}
		_, err := connection.Read(make([]byte, 1))
		testkit.Equal(t, nil, err) // the answer has begun
	}
	status, _ := f.Call("GET", "/ping", "")
	testkit.Equal(t, 200, status)
	testkit.Equal(t, []string{"next\n"}, f.Run(testkit.Object{"command": "echo next"}).Stdout)
	testkit.Eventually(t, "the command ends", func() bool { return sys.FileText(marker) == "ended" })
	testkit.Eventually(t, "the files are closed", func() bool { return !holds(t, file) })
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the service is not left")
	}
}

// holds reports whether this process has a file open.
func holds(t *testing.T, path string) bool {
	t.Helper()
	descriptors, err := filepath.Glob("/proc/self/fd/*")
	if err != nil || len(descriptors) == 0 {
		t.Fatal("no descriptors", err)
	}
	return slices.ContainsFunc(descriptors, func(descriptor string) bool {
		target, _ := os.Readlink(descriptor)
		return target == path
	})
}

func TestASlowReaderGetsAll(t *testing.T) {
	f := newFixture(t)
	testkit.Shorten(t, &f.server.connections.answerLimit)
	connection := f.serve()()
	file := filepath.Join(t.TempDir(), "large")
	testkit.Equal(t, nil, os.WriteFile(file, bytes.Repeat([]byte("sallyport"), 1<<20), 0o600))
	head := "GET /files/download?path=" + file + " HTTP/1.0\r\n" + httpx.TokenHeader + ": " + testkit.Token + "\r\n\r\n"
	began := time.Now()
	io.WriteString(connection, head)
	answer := bufio.NewReader(connection)
	response, err := http.ReadResponse(answer, nil)
	testkit.Equal(t, nil, err)
	digest, read, buffer := sha256.New(), 0, make([]byte, 256<<10)
	for {
		n, err := io.ReadFull(response.Body, buffer)
		digest.Write(buffer[:n])
		read += n
		if err != nil {
			break
		}
		time.Sleep(60 * time.Millisecond)
	}
	testkit.Equal(t, 9<<20, read)
	testkit.Equal(t, sha256.Sum256(bytes.Repeat([]byte("sallyport"), 1<<20)), [32]byte(digest.Sum(nil)))
	testkit.Equal(t, true, time.Since(began) > 2*f.server.connections.answerLimit)
}

func TestTimeLimitsReachBeyondADayAndNeverWrapAround(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	const day, most = 86_400_000, int64(math.MaxInt64 / int64(time.Millisecond))
	for timeout, expected := range map[int64]int{
		0: 200, day: 200, day + 1: 200, 400 * day: 200, most: 200, most + 1: 400, math.MaxInt64: 400, -1: 400, math.MinInt64: 400,
	} {
		for _, path := range []string{"/command", "/session/" + session + "/run"} {
			status, body := f.Call("POST", path, fmt.Sprintf(`{"command":"sleep 0.01","timeout":%d}`, timeout))
			if status != expected || (status == 200) != strings.Contains(body, "execution_complete") {
				t.Error(path, timeout, status, body)
			}
		}
	}
}

func TestWhatACommandLeftRunningOutlivesItsOwnOutput(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	flag := t.TempDir() + "/"
	command := func(name string) string {
		return "(while [ ! -e " + flag + "go ]; do sleep 0.02; done; echo one; echo two >&2; head -c 200000 /dev/zero; echo >" + flag + name + ") &"
	}
	f.Run(testkit.Object{"command": command("foreground")})
	f.In(session, command("session"))
	id := f.Run(testkit.Object{"command": command("background"), "background": true}).ID
	f.Ended(id)
	// The foreground command leaves two pipes.
	testkit.Eventually(t, "all are left", func() bool { return f.launcher.Leftovers.Count() == 4 })
	if err := os.WriteFile(flag+"go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"foreground", "session", "background"} {
		testkit.Eventually(t, name+" ended by itself", func() bool { _, err := os.Stat(flag + name); return err == nil })
	}
	testkit.Eventually(t, "all pipes are closed", func() bool { return f.launcher.Leftovers.Count() == 0 })
	_, text := f.Call("GET", "/command/"+id+"/logs", "")
	testkit.Equal(t, "one\ntwo\n"+strings.Repeat("\x00", 200000), text)
}

func TestCodeWithoutALanguageIsACommand(t *testing.T) {
	f := newFixture(t)
	result := f.RunAt("/code", testkit.Object{"code": "echo $((6*7)); exit 3", "context": nil})
	testkit.Equal(t, []string{"42\n"}, result.Stdout)
	testkit.Equal(t, "3", result.Last.Error.Evalue)
	testkit.Equal(t, 32, len(result.ID))
}

// argumentLists returns the command lines of all processes that this process can see.
func argumentLists(t *testing.T) map[string]string {
	t.Helper()
	lists := map[string]string{}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil { // an error means that the process has ended
			lists[file] = string(text)
		}
	}
	return lists
}

// untilReleased is text for a shell that needs no programs. It ends when a FIFO is opened for writing.
const untilReleased = `: %s; read x <%s`

func TestTextOfASessionIsInNoArgumentList(t *testing.T) {
	for _, shell := range []string{"bash", "sh"} {
		f := newFixture(t)
		place := testkit.Workspace(t)
		if shell == "sh" {
			f.launcher.Env.Bind(map[string]string{"PATH": testhost.WithoutBash(place)})
		}
		fifo := place + "/fifo"
		if err := syscall.Mkfifo(fifo, 0o666); err != nil {
			t.Fatal(err)
		}
		isolated, _ := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": place, "mode": "rw"}})
		for name, run := range map[string]struct {
			path    string
			request testkit.Object
		}{
			"session":    {"/session/" + f.NewSession("{}") + "/run", testkit.Object{}},
			"isolated":   {isolated + "/run", testkit.Object{"envs": testkit.Object{"GIVEN": "secret-value"}}},
			"background": {isolated + "/run", testkit.Object{"background": true, "envs": testkit.Object{"GIVEN": "secret-value"}}},
		} {
			code := fmt.Sprintf(untilReleased, "secret-text", fifo)
			run.request["command"], run.request["code"] = code, code
			body, _ := json.Marshal(run.request)
			response := f.Do("POST", run.path, bytes.NewReader(body))
			// The write end opens when the run reads the FIFO. Then the shell has already received its text.
			release, err := os.OpenFile(fifo, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			for place, list := range argumentLists(t) {
				if strings.Contains(list, "secret-") {
					t.Errorf("%s, %s: %s has %q", shell, name, place, list)
				}
			}
			release.Close()
			_, _ = io.Copy(io.Discard, response.Body)
		}
	}
}

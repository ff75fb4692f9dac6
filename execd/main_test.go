package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const testToken = "a token for tests"

// testReaper is the only one of the test process: it takes every status.
var testReaper *Reaper

// testBinary is the daemon itself, built before the reaper starts.
var testBinary string

func TestMain(m *testing.M) {
	flag.Parse()
	if fuzzing := flag.Lookup("test.fuzz"); fuzzing != nil && fuzzing.Value.String() != "" {
		os.Exit(m.Run()) // parsers alone: nothing is started
	}
	directory, err := os.MkdirTemp("", "execd-test-")
	if err != nil {
		panic(err)
	}
	if err := os.Chmod(directory, 0o755); err != nil { // helpers are started as other users
		panic(err)
	}
	testBinary = filepath.Join(directory, "execd")
	build := exec.Command("go", "build", "-trimpath", "-o", testBinary, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		panic(string(output))
	}
	closeInheritedOnExec()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP) // as the daemon does: else children ignore it under nohup
	testReaper = NewReaper()
	code := m.Run()
	os.RemoveAll(directory)
	os.Exit(code)
}

type fixture struct {
	t       *testing.T
	server  *Server
	http    *httptest.Server
	envFile string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	auth, err := NewAuth(hashToken(testToken), false)
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, envFile: filepath.Join(t.TempDir(), "env")}
	env := NewEnvironment(append(os.Environ(), "EXECD_ENVS="+f.envFile, "EXECD_ACCESS_TOKEN=secret", "FIXTURE=daemon"))
	accounts := func() Accounts { return LoadAccounts("") }
	logger := log.New(io.Discard, "", 0)
	launcher := &Launcher{
		reaper: testReaper, env: env, accounts: accounts, directory: "/", tail: defaultTail,
		slots: NewSlots(defaultMaxRunning), leftovers: newLeftovers(), log: logger,
	}
	commands := &Commands{Launcher: launcher, records: NewRecords()}
	f.server = &Server{
		binding: &Binding{auth: auth}, hooks: &Hooks{reaper: testReaper, env: env, log: logger}, port: defaultPort,
		commands: commands, sessions: NewSessions(launcher), terminals: NewTerminals(launcher), code: NewCodeContexts(&Jupyter{}, launcher, commands),
		files:      NewFiles(env, accounts, "/", 0o022),
		identities: NewIdentities(testReaper, accounts, logger, testProgram(t)),
		isolation:  NewIsolation(launcher, testProgram(t), isolationRoot(t), false),
		metrics:    NewMetrics(), proxy: newProxy(func(string) {}), log: logger, connections: NewConnections(),
	}
	f.http = httptest.NewServer(f.server)
	t.Cleanup(f.http.Close)
	return f
}

// testProgram is the daemon, where the program of this process is that of the tests.
func testProgram(t *testing.T) *Program {
	t.Helper()
	program, err := ThisProgram()
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(testBinary)
	if err != nil {
		t.Fatal(err)
	}
	const above = 32 // the descriptors of a child
	number, _, errno := syscall.Syscall(syscall.SYS_FCNTL, file.Fd(), syscall.F_DUPFD_CLOEXEC, above)
	file.Close()
	if errno != 0 {
		t.Fatal(errno)
	}
	t.Cleanup(func() {
		syscall.Close(int(number))
		syscall.Close(program.proc)
	})
	program.name = "self/fd/" + strconv.Itoa(int(number))
	return program
}

// isolationRoot is outside /tmp, of which sessions have their own.
func isolationRoot(t *testing.T) string {
	root, err := os.MkdirTemp("/var/tmp", "execd-isolation-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	return root
}

func (f *fixture) do(method, path string, body io.Reader, header ...string) *http.Response {
	f.t.Helper()
	request, err := http.NewRequest(method, f.http.URL+path, body)
	if err != nil {
		f.t.Fatal(err)
	}
	request.Header.Set(tokenHeader, testToken)
	for i := 0; i+1 < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { response.Body.Close() })
	return response
}

// call returns status and body.
func (f *fixture) call(method, path, body string, header ...string) (int, string) {
	f.t.Helper()
	var reader io.Reader
	if body != "" {
		reader = strings.NewReader(body)
	}
	response := f.do(method, path, reader, header...)
	data, err := io.ReadAll(response.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return response.StatusCode, string(data)
}

type testEvent struct {
	Type      string
	Text      string
	Timestamp int64
	Error     *struct {
		Ename, Evalue string
		Traceback     []string
	}
}

type testRun struct {
	id             string
	stdout, stderr []string
	last           testEvent
	raw            []byte
}

// run executes a foreground command to its end.
func (f *fixture) run(request any) testRun {
	f.t.Helper()
	return f.runAt("/command", request)
}

// runAt reads the stream of a route to its end.
func (f *fixture) runAt(path string, request any) testRun {
	f.t.Helper()
	body, err := json.Marshal(request)
	if err != nil {
		f.t.Fatal(err)
	}
	response := f.do("POST", path, bytes.NewReader(body))
	if response.StatusCode != 200 {
		text, _ := io.ReadAll(response.Body)
		f.t.Fatalf("status %d: %s", response.StatusCode, text)
	}
	var result testRun
	if result.raw, err = io.ReadAll(response.Body); err != nil {
		f.t.Fatal(err)
	}
	for frame := range strings.SplitSeq(strings.TrimSuffix(string(result.raw), "\n\n"), "\n\n") {
		var event testEvent
		if err := json.Unmarshal([]byte(frame), &event); err != nil {
			f.t.Fatalf("%v: %q", err, frame)
		}
		switch event.Type {
		case "init":
			result.id = event.Text
		case "stdout":
			result.stdout = append(result.stdout, event.Text)
		case "stderr":
			result.stderr = append(result.stderr, event.Text)
		}
		result.last = event
	}
	return result
}

// begin starts a command and returns its id and the rest of the stream.
func (f *fixture) begin(request any) (string, *bufio.Reader, *http.Response) {
	f.t.Helper()
	body, _ := json.Marshal(request)
	response := f.do("POST", "/command", bytes.NewReader(body))
	reader := bufio.NewReader(response.Body)
	var event testEvent
	line, err := reader.ReadBytes('\n')
	if err != nil || json.Unmarshal(line, &event) != nil {
		f.t.Fatalf("no first event: %v %q", err, line)
	}
	return event.Text, reader, response
}

type object = map[string]any

func equal[T any](t *testing.T, expected, actual T) {
	t.Helper()
	want, _ := json.Marshal(expected)
	got, _ := json.Marshal(actual)
	if !bytes.Equal(want, got) {
		t.Fatalf("expected %s\nactual   %s", want, got)
	}
}

// eventually waits for a condition that another process brings about.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if condition() {
			return
		}
	}
	t.Fatal("did not happen: " + what)
}

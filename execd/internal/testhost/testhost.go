// Package testhost starts programs for tests of several packages. It has the reaper of the test process, builds the
// daemon's program, and starts the daemon.
package testhost

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sallyport.dev/execd/internal/account"
	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
	"sallyport.dev/execd/internal/testkit"
)

// Reaper is the only reaper of the test process: it collects the status of every child.
var Reaper *process.Reaper

// built is the directory of the daemon's program, which is built when a test first needs it.
var built struct {
	once      sync.Once
	directory string
	err       error
}

// Main runs the tests of a package.
func Main(m *testing.M) int {
	flag.Parse()
	if fuzzing := flag.Lookup("test.fuzz"); fuzzing != nil && fuzzing.Value.String() != "" {
		return m.Run() // fuzz tests run parsers only and start no program
	}
	sys.CloseInheritedOnExec()
	// As in the daemon: otherwise children ignore SIGHUP under nohup.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	Reaper = process.NewReaper()
	defer func() { os.RemoveAll(built.directory) }()
	return m.Run()
}

// Binary returns the path of the daemon's program.
func Binary(t *testing.T) string {
	t.Helper()
	built.once.Do(func() { built.err = build() })
	if built.err != nil {
		t.Fatal(built.err)
	}
	return filepath.Join(built.directory, "execd")
}

// build compiles the program. It starts the compiler with the reaper, because the reaper collects its status.
func build() error {
	compiler, err := exec.LookPath("go")
	if err != nil {
		return err
	}
	if built.directory, err = os.MkdirTemp("", "execd-test-"); err != nil {
		return err
	}
	if err := os.Chmod(built.directory, 0o755); err != nil { // helpers are started as other users
		return err
	}
	null, err := process.OpenNull()
	if err != nil {
		return err
	}
	defer null.Close()
	child, err := Reaper.Start(process.Spec{
		Path: compiler, Argv: []string{"go", "build", "-trimpath", "-o", filepath.Join(built.directory, "execd"), "sallyport.dev/execd"},
		Env: append([]string{"CGO_ENABLED=0"}, os.Environ()...), Files: [3]uintptr{null.Fd(), 2, 2},
	})
	if err != nil {
		return err
	}
	if <-child.Done; process.ExitNumber(child.Status) != 0 {
		return errors.New("the daemon does not build")
	}
	return nil
}

// Program returns the daemon's program in the form in which a daemon opens its own program.
func Program(t *testing.T) *process.Program {
	t.Helper()
	program, err := process.ProgramAt(Binary(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(program.Close)
	return program
}

// Launcher makes a launcher that starts programs as the daemon does, with this process's environment and FIXTURE.
// envFile is the path of its EXECD_ENVS file, which does not exist yet.
func Launcher(t *testing.T) (launcher *process.Launcher, envFile string) {
	t.Helper()
	envFile = filepath.Join(t.TempDir(), "env")
	return &process.Launcher{
		Reaper: Reaper, Env: environ.New(append(os.Environ(), "EXECD_ENVS="+envFile, "EXECD_ACCESS_TOKEN=secret", "FIXTURE=daemon")),
		Accounts: func() account.Accounts { return account.Load("") }, Directory: "/", Tail: process.DefaultTail,
		Slots: process.NewSlots(512), Leftovers: process.NewLeftovers(), Log: log.New(io.Discard, "", 0),
	}, envFile
}

// Handle makes a handler that serves the routes and /ping as the daemon does, but without a token.
func Handle(routes ...httpx.Route) http.Handler {
	ping := httpx.Route{Method: "GET", Path: "/ping", Handler: httpx.Always(func(w http.ResponseWriter, _ *http.Request) { httpx.WriteEmpty(w) })}
	routes = append(routes, ping)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if path, err := httpx.SplitPath(r.URL.EscapedPath()); err == nil {
			if handler := httpx.FindRoute(routes, r.Method, path.WithoutLastSlash()); handler != nil {
				handler(w, r)
				return
			}
		}
		httpx.NotFound(w)
	})
}

// Output runs a program from the PATH of a launcher's environment, and returns its output.
func Output(t *testing.T, launcher *process.Launcher, argv ...string) string {
	t.Helper()
	env := launcher.Env.ForCommand(nil)
	path, err := process.LookProgram(argv[0], env["PATH"])
	if err != nil {
		t.Fatal(err)
	}
	null, err := process.OpenNull()
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	child, err := launcher.Reaper.Start(process.Spec{
		Path: path, Argv: argv, Env: environ.List(env), Dir: "/", Files: [3]uintptr{null.Fd(), write.Fd(), write.Fd()},
	})
	write.Close()
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(read)
	if err != nil {
		t.Fatal(err)
	}
	<-child.Done
	return string(text)
}

// WithoutBash links sh, env and dash into a directory, for a PATH without bash, and returns the directory.
func WithoutBash(directory string) string {
	for _, name := range []string{"sh", "env", "dash"} {
		for _, place := range []string{"/bin/", "/usr/bin/"} {
			if _, err := os.Stat(place + name); err == nil {
				_ = os.Symlink(place+name, directory+"/"+name)
			}
		}
	}
	return directory
}

// HashArguments are the arguments for a daemon whose token is testkit.Token.
var HashArguments = []string{"--access-token-sha256", hashOf(testkit.Token)}

func hashOf(token string) string {
	hash := sha256.Sum256([]byte(token))
	return hex.EncodeToString(hash[:])
}

// Daemon starts the daemon's program as a child of the test process's reaper.
func Daemon(t *testing.T, env []string, arguments ...string) (child *process.Process, url string, stderr func() string) {
	t.Helper()
	return DaemonUnder(t, env, []string{Binary(t)}, arguments...)
}

// DaemonUnder starts a command line that ends with the daemon's program. It appends the arguments.
func DaemonUnder(t *testing.T, env, program []string, arguments ...string) (child *process.Process, url string, stderr func() string) {
	t.Helper()
	port := freePort(t)
	path := filepath.Join(t.TempDir(), "stderr")
	log, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	null, _ := process.OpenNull()
	defer null.Close()
	child, err = Reaper.Adopt(func() (int, error) { // forked here with all capabilities, which Start does not give
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		mask := sys.EmptySignalMask()
		defer sys.RestoreSignalMask(mask)
		return syscall.ForkExec(program[0], slices.Concat(program, []string{"--port", port}, arguments), &syscall.ProcAttr{
			// If a name occurs twice, the first entry is used.
			Env:   append(slices.Clone(env), "PATH="+os.Getenv("PATH"), "EXECD_ENVS="+filepath.Join(t.TempDir(), "env")),
			Files: []uintptr{null.Fd(), log.Fd(), log.Fd()}, Dir: "/", Sys: &syscall.SysProcAttr{Setsid: true},
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		child.SignalGroup(syscall.SIGKILL)
		if t.Failed() {
			t.Log(testkit.MustRead(t, path))
		}
	})
	return child, "http://127.0.0.1:" + port, func() string { return testkit.MustRead(t, path) }
}

// freePort returns a port that is free on all addresses, as the daemon needs it. The port is outside the range from
// which the kernel takes the ports of outgoing connections.
func freePort(t *testing.T) string {
	t.Helper()
	for range 100 {
		port := strconv.Itoa(10_000 + rand.IntN(20_000))
		if listener, err := net.Listen("tcp4", ":"+port); err == nil {
			listener.Close()
			return port
		}
	}
	t.Fatal("no free port")
	return ""
}

// Children returns the command lines of the children of this process, by process id.
func Children(t *testing.T) map[int]string {
	t.Helper()
	files, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil || len(files) == 0 {
		t.Fatal("no children are listed")
	}
	found := map[int]string{}
	for _, file := range files {
		text, _ := os.ReadFile(file) // the thread may have ended
		for _, field := range strings.Fields(string(text)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			line, _ := os.ReadFile("/proc/" + field + "/cmdline")
			found[pid] = strings.ReplaceAll(strings.TrimSuffix(string(line), "\x00"), "\x00", " ")
		}
	}
	return found
}

// ExitOf waits for the end of a process and returns its exit status. The test fails if the process does not end.
func ExitOf(t *testing.T, child *process.Process) int {
	t.Helper()
	select {
	case <-child.Done:
		return process.ExitNumber(child.Status)
	case <-time.After(15 * time.Second):
		t.Fatal("the daemon did not end")
		return 0
	}
}

// Answers returns a condition that reports whether a daemon answers /ping.
func Answers(url string) func() bool {
	return func() bool {
		response, err := http.Get(url + "/ping")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == 200
	}
}

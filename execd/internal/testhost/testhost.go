// Package testhost has what tests of several packages start programs with: the reaper of
// the test process, the daemon's own program, and the daemon itself.
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

// Reaper is the only one of the test process: it takes every status.
var Reaper *process.Reaper

// built is the directory of the daemon's program, made when a test asks for it.
var built struct {
	once      sync.Once
	directory string
	err       error
}

// Main runs the tests of a package.
func Main(m *testing.M) int {
	flag.Parse()
	if fuzzing := flag.Lookup("test.fuzz"); fuzzing != nil && fuzzing.Value.String() != "" {
		return m.Run() // parsers alone: nothing is started
	}
	sys.CloseInheritedOnExec()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP) // as the daemon does: else children ignore it under nohup
	Reaper = process.NewReaper()
	defer func() { os.RemoveAll(built.directory) }()
	return m.Run()
}

// Binary is the program of the daemon.
func Binary(t *testing.T) string {
	t.Helper()
	built.once.Do(func() { built.err = build() })
	if built.err != nil {
		t.Fatal(built.err)
	}
	return filepath.Join(built.directory, "execd")
}

// build makes the program; the reaper has the compiler's status.
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

// Program is the program of the daemon, as a daemon has its own.
func Program(t *testing.T) *process.Program {
	t.Helper()
	program, err := process.ProgramAt(Binary(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(program.Close)
	return program
}

// Launcher starts programs as the daemon does, with this process's environment and FIXTURE;
// envFile is its EXECD_ENVS, which is not there yet.
func Launcher(t *testing.T) (launcher *process.Launcher, envFile string) {
	t.Helper()
	envFile = filepath.Join(t.TempDir(), "env")
	return &process.Launcher{
		Reaper: Reaper, Env: environ.New(append(os.Environ(), "EXECD_ENVS="+envFile, "EXECD_ACCESS_TOKEN=secret", "FIXTURE=daemon")),
		Accounts: func() account.Accounts { return account.Load("") }, Directory: "/", Tail: process.DefaultTail,
		Slots: process.NewSlots(512), Leftovers: process.NewLeftovers(), Log: log.New(io.Discard, "", 0),
	}, envFile
}

// Handle serves routes as the daemon does, without its token, and /ping.
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

// Output is what a program writes that a launcher's environment has on its PATH.
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

// WithoutBash fills a directory with what a shell needs, for a PATH without bash.
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

// HashArguments start a daemon whose token is testkit.Token.
var HashArguments = []string{"--access-token-sha256", hashOf(testkit.Token)}

func hashOf(token string) string {
	hash := sha256.Sum256([]byte(token))
	return hex.EncodeToString(hash[:])
}

// Daemon starts the real program under the test's reaper.
func Daemon(t *testing.T, env []string, arguments ...string) (child *process.Process, url string, stderr func() string) {
	t.Helper()
	return DaemonUnder(t, env, []string{Binary(t)}, arguments...)
}

// DaemonUnder starts the real program, which ends a command line, with arguments behind it.
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
	child, err = Reaper.Adopt(func() (int, error) { // with all capabilities, which no other child has
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		mask := sys.EmptySignalMask()
		defer sys.RestoreSignalMask(mask)
		return syscall.ForkExec(program[0], slices.Concat(program, []string{"--port", port}, arguments), &syscall.ProcAttr{
			// The first of two entries of one name counts.
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

// freePort is free on all addresses, as the daemon needs it, and outside the range from which
// the kernel takes the ports of outgoing connections.
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

// Children are the command lines of the children of this process.
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

// ExitOf is the exit status of a process, which must end.
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

// Answers reports whether a daemon answers.
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

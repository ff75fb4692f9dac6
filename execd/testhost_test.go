package main

// What tests of several packages start programs with: the reaper of the test process, the
// daemon's own program, and the daemon itself.

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
)

// testReaper is the only one of the test process: it takes every status.
var testReaper *Reaper

// built is the directory of the daemon's program, made when a test asks for it.
var built struct {
	once      sync.Once
	directory string
	err       error
}

// testMain runs the tests of a package.
func testMain(m *testing.M) int {
	flag.Parse()
	if fuzzing := flag.Lookup("test.fuzz"); fuzzing != nil && fuzzing.Value.String() != "" {
		return m.Run() // parsers alone: nothing is started
	}
	closeInheritedOnExec()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP) // as the daemon does: else children ignore it under nohup
	testReaper = NewReaper()
	defer func() { os.RemoveAll(built.directory) }()
	return m.Run()
}

// testBinary is the program of the daemon.
func testBinary(t *testing.T) string {
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
	null, err := openNull()
	if err != nil {
		return err
	}
	defer null.Close()
	process, err := testReaper.Start(Spec{
		Path: compiler, Argv: []string{"go", "build", "-trimpath", "-o", filepath.Join(built.directory, "execd"), "sallyport.dev/execd"},
		Env: append([]string{"CGO_ENABLED=0"}, os.Environ()...), Files: [3]uintptr{null.Fd(), 2, 2},
	})
	if err != nil {
		return err
	}
	if <-process.Done; exitNumber(process.Status) != 0 {
		return errors.New("the daemon does not build")
	}
	return nil
}

// testProgram is the program of the daemon, as a daemon has its own.
func testProgram(t *testing.T) *Program {
	t.Helper()
	program, err := ProgramAt(testBinary(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(program.Close)
	return program
}

// testLauncher starts programs as the daemon does, with this process's environment and FIXTURE;
// envFile is its EXECD_ENVS, which is not there yet.
func testLauncher(t *testing.T) (launcher *Launcher, envFile string) {
	t.Helper()
	envFile = filepath.Join(t.TempDir(), "env")
	return &Launcher{
		reaper: testReaper, env: NewEnvironment(append(os.Environ(), "EXECD_ENVS="+envFile, "EXECD_ACCESS_TOKEN=secret", "FIXTURE=daemon")),
		accounts: func() Accounts { return LoadAccounts("") }, directory: "/", tail: defaultTail,
		slots: NewSlots(512), leftovers: newLeftovers(), log: log.New(io.Discard, "", 0),
	}, envFile
}

// handle serves routes as the daemon does, without its token, and /ping.
func handle(routes ...routeTo) http.Handler {
	ping := routeTo{"GET", "/ping", always(func(w http.ResponseWriter, _ *http.Request) { writeEmpty(w) })}
	routes = append(routes, ping)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if path, err := splitPath(r.URL.EscapedPath()); err == nil {
			if handler := findRoute(routes, r.Method, path.withoutLastSlash()); handler != nil {
				handler(w, r)
				return
			}
		}
		notFound(w)
	})
}

// testOutput is what a program writes that a launcher's environment has on its PATH.
func testOutput(t *testing.T, launcher *Launcher, argv ...string) string {
	t.Helper()
	env := launcher.env.ForCommand(nil)
	path, err := lookProgram(argv[0], env["PATH"])
	if err != nil {
		t.Fatal(err)
	}
	null, err := openNull()
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	process, err := launcher.reaper.Start(Spec{
		Path: path, Argv: argv, Env: environList(env), Dir: "/", Files: [3]uintptr{null.Fd(), write.Fd(), write.Fd()},
	})
	write.Close()
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(read)
	if err != nil {
		t.Fatal(err)
	}
	<-process.Done
	return string(text)
}

// withoutBash fills a directory with what a shell needs, for a PATH without bash.
func withoutBash(directory string) string {
	for _, name := range []string{"sh", "env", "dash"} {
		for _, place := range []string{"/bin/", "/usr/bin/"} {
			if _, err := os.Stat(place + name); err == nil {
				_ = os.Symlink(place+name, directory+"/"+name)
			}
		}
	}
	return directory
}

// hashArguments start a daemon whose token is testToken.
var hashArguments = []string{"--access-token-sha256", hashOf(testToken)}

func hashOf(token string) string {
	hash := sha256.Sum256([]byte(token))
	return hex.EncodeToString(hash[:])
}

// daemon starts the real program under the test's reaper.
func daemon(t *testing.T, env []string, arguments ...string) (process *Process, url string, stderr func() string) {
	t.Helper()
	return daemonUnder(t, env, []string{testBinary(t)}, arguments...)
}

// daemonUnder starts the real program, which ends a command line, with arguments behind it.
func daemonUnder(t *testing.T, env, program []string, arguments ...string) (process *Process, url string, stderr func() string) {
	t.Helper()
	port := freePort(t)
	path := filepath.Join(t.TempDir(), "stderr")
	log, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	null, _ := openNull()
	defer null.Close()
	process, err = testReaper.Adopt(func() (int, error) { // with all capabilities, which no other child has
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		mask := emptySignalMask()
		defer restoreSignalMask(mask)
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
		process.SignalGroup(syscall.SIGKILL)
		if t.Failed() {
			t.Log(mustRead(t, path))
		}
	})
	return process, "http://127.0.0.1:" + port, func() string { return mustRead(t, path) }
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

// children are the command lines of the children of this process.
func children(t *testing.T) map[int]string {
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

// exitOf is the exit status of a process, which must end.
func exitOf(t *testing.T, process *Process) int {
	t.Helper()
	select {
	case <-process.Done:
		return exitNumber(process.Status)
	case <-time.After(15 * time.Second):
		t.Fatal("the daemon did not end")
		return 0
	}
}

// answers tells whether a daemon answers.
func answers(url string) func() bool {
	return func() bool {
		response, err := http.Get(url + "/ping")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == 200
	}
}

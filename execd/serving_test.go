package main

import (
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/supervise"
	"sallyport.dev/execd/internal/sys"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

// running is a real daemon in one of its modes.
type running struct {
	started *process.Process // the daemon, or the process that made its PID namespace
	pid     int
	url     string
	stderr  func() string
}

// modes are the ways in which a daemon can run.
var modes = map[string]func(t *testing.T, env []string, entrypoint ...string) *running{
	"PID 1": func(t *testing.T, env []string, entrypoint ...string) *running {
		program, err := process.LookProgram("unshare", os.Getenv("PATH"))
		if err != nil {
			t.Fatal(err)
		}
		started, url, stderr := testhost.DaemonUnder(t, env,
			append([]string{program, "--pid", "--fork", "--mount-proc", "--kill-child"}, testhost.Binary(t)),
			append(append(testhost.HashArguments, "--stop-grace", "1s", "--init", "--"), entrypoint...)...)
		children := "/proc/" + strconv.Itoa(started.Pid) + "/task/" + strconv.Itoa(started.Pid) + "/children"
		made := &running{started: started, url: url, stderr: stderr}
		testkit.Eventually(t, "a first process", func() bool {
			made.pid, err = strconv.Atoi(sys.FileText(children))
			return err == nil
		})
		return made
	},
	"subreaper": func(t *testing.T, env []string, entrypoint ...string) *running {
		started, url, stderr := testhost.Daemon(t, env, append(append(testhost.HashArguments, "--stop-grace", "1s", "--init", "--"), entrypoint...)...)
		return &running{started, started.Pid, url, stderr}
	},
	"without init": func(t *testing.T, env []string, _ ...string) *running {
		started, url, stderr := testhost.Daemon(t, env, testhost.HashArguments...)
		return &running{started, started.Pid, url, stderr}
	},
}

func (r *running) port() string { return r.url[strings.LastIndexByte(r.url, ':')+1:] }

// breakListener shuts the daemon's listening socket down, so that it no longer listens.
func (r *running) breakListener(t *testing.T) {
	t.Helper()
	const pidfdGetfd = 438
	number := r.listenerNumber(t)
	child, _, errno := syscall.Syscall(434, uintptr(r.pid), 0, 0) // pidfd_open
	if errno != 0 {
		t.Fatal(errno)
	}
	defer syscall.Close(int(child))
	socket, _, errno := syscall.Syscall(pidfdGetfd, child, uintptr(number), 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	defer syscall.Close(int(socket))
	if err := syscall.Shutdown(int(socket), syscall.SHUT_RDWR); err != nil {
		t.Fatal(err)
	}
}

// listenerNumber returns the number of the listener's descriptor in the daemon.
func (r *running) listenerNumber(t *testing.T) int {
	t.Helper()
	port, _ := strconv.Atoi(r.port())
	where := strings.ToUpper(":" + strconv.FormatInt(int64(port)+1<<16, 16)[1:])
	root := "/proc/" + strconv.Itoa(r.pid)
	for line := range strings.Lines(sys.FileText(root + "/net/tcp")) {
		fields := strings.Fields(line)
		if len(fields) < 10 || !strings.HasSuffix(fields[1], where) || fields[3] != "0A" {
			continue
		}
		links, _ := filepath.Glob(root + "/fd/*")
		for _, link := range links {
			if target, _ := os.Readlink(link); target == "socket:["+fields[9]+"]" {
				number, _ := strconv.Atoi(filepath.Base(link))
				return number
			}
		}
	}
	t.Fatal("no listener")
	return 0
}

func TestADaemonWhoseListenerBreaksListensAgain(t *testing.T) {
	for name, start := range modes {
		t.Run(name, func(t *testing.T) {
			r := start(t, nil, "sleep", "60")
			testkit.Eventually(t, "answer", testhost.Answers(r.url))
			for range 3 {
				former := http.Client{Transport: &http.Transport{}}
				testkit.Equal(t, 200, statusOf(t, &former, r.url+"/ping"))
				r.breakListener(t)
				testkit.Eventually(t, "answer again", func() bool {
					client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
					response, err := client.Get(r.url + "/ping")
					if err != nil {
						return false
					}
					response.Body.Close()
					return response.StatusCode == 200
				})
				testkit.Equal(t, 200, statusOf(t, &former, r.url+"/ping")) // on its former connection
				former.CloseIdleConnections()
			}
			testkit.Equal(t, 3, strings.Count(r.stderr(), "listening again"))
			select {
			case <-r.started.Done:
				t.Fatal("it has ended")
			default:
			}
		})
	}
}

func statusOf(t *testing.T, client *http.Client, url string) int {
	t.Helper()
	response, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	return response.StatusCode
}

// takePort breaks the listener of a daemon and listens on its port instead.
func (r *running) takePort(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(r.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(r.pid, syscall.SIGCONT) }()
	testkit.Eventually(t, "it stands still", func() bool {
		_, state, _ := strings.Cut(sys.FileText("/proc/"+strconv.Itoa(r.pid)+"/stat"), ") ")
		return strings.HasPrefix(state, "T")
	})
	r.breakListener(t)
	taken, err := net.Listen("tcp4", "0.0.0.0:"+r.port())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() })
}

func TestADaemonThatCannotListenAnyMoreEnds(t *testing.T) {
	marker := filepath.Join(t.TempDir(), "marker")
	hooks := `OPENSANDBOX_LIFECYCLE={"preStart":{"command":["sleep","60"]}}`
	heeding := []string{"sh", "-c", `trap 'echo term > ` + marker + `; exit 3' TERM; echo up; while :; do sleep 0.05; done`}
	var all []*running
	for _, each := range []struct {
		mode       string
		env        []string
		entrypoint []string
	}{
		{"PID 1", nil, heeding}, {"PID 1", []string{"PATH=/nowhere"}, []string{"tail", "-f", "/dev/null"}}, {"PID 1", []string{hooks}, []string{"true"}},
		{"subreaper", nil, []string{"sh", "-c", "trap '' TERM; echo up; while :; do sleep 60; done"}},
		{"without init", nil, nil},
	} {
		r := modes[each.mode](t, each.env, each.entrypoint...)
		testkit.Eventually(t, "answer", testhost.Answers(r.url))
		if len(each.entrypoint) > 0 && strings.Contains(each.entrypoint[len(each.entrypoint)-1], "echo up") {
			testkit.Eventually(t, "up", func() bool { return strings.Contains(r.stderr(), "up\n") })
		}
		all = append(all, r)
	}
	for _, r := range all {
		r.takePort(t)
	}
	for _, r := range all {
		select {
		case <-r.started.Done:
			testkit.Equal(t, supervise.ExitUnserved, process.ExitNumber(r.started.Status))
			testkit.Equal(t, true, strings.Contains(r.stderr(), "the API is gone for good"))
		case <-time.After(30 * time.Second):
			t.Errorf("it lives on: %s", r.stderr())
		}
	}
	testkit.Equal(t, "term", sys.FileText(marker))
}

func TestADaemonWithoutDescriptorsAnswersWhenItHasSomeAgain(t *testing.T) {
	r := modes["subreaper"](t, nil, "sleep", "60")
	testkit.Eventually(t, "answer", testhost.Answers(r.url))
	former := setDescriptorLimit(t, r.pid, 3)
	connection, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	_, _ = io.WriteString(connection, "GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
	testkit.Eventually(t, "accept fails", func() bool { return strings.Contains(r.stderr(), "too many open files") })
	setDescriptorLimit(t, r.pid, former)
	_ = connection.SetReadDeadline(time.Now().Add(10 * time.Second))
	answer := make([]byte, 12)
	_, err = io.ReadFull(connection, answer)
	testkit.Equal(t, "HTTP/1.1 200", string(answer))
	testkit.Equal(t, nil, err)
	testkit.Equal(t, 0, strings.Count(r.stderr(), "listening again"))
}

// setDescriptorLimit sets the limit of a process's open descriptors, and returns the former limit.
func setDescriptorLimit(t *testing.T, pid int, most uint64) (former uint64) {
	t.Helper()
	var limit syscall.Rlimit
	call := func(wanted, present *syscall.Rlimit) {
		_, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, uintptr(pid), syscall.RLIMIT_NOFILE,
			uintptr(unsafe.Pointer(wanted)), uintptr(unsafe.Pointer(present)), 0, 0)
		if errno != 0 {
			t.Fatal(errno)
		}
	}
	call(nil, &limit)
	former, limit.Cur = limit.Cur, most
	call(&limit, nil)
	return former
}

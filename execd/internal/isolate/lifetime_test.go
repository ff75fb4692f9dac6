package isolate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sallyport.dev/execd/internal/helper"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

// background begins a run and returns its id.
func (f *fixture) background(session, code string) string {
	f.T.Helper()
	body, _ := json.Marshal(testkit.Object{"code": code, "background": true})
	status, answer := f.Call("POST", session+"/run", string(body))
	var begun runStatus
	if err := json.Unmarshal([]byte(answer), &begun); status != 202 || err != nil {
		f.T.Fatal(status, answer)
	}
	return begun.RunID
}

// overdue makes it look as if a session had not been used for a day.
func (f *fixture) overdue(id string) *session {
	f.T.Helper()
	found := f.session(id)
	f.isolation.mutex.Lock()
	defer f.isolation.mutex.Unlock()
	found.used = time.Now().Add(-24 * time.Hour)
	return found
}

func (f *fixture) session(id string) *session {
	f.T.Helper()
	f.isolation.mutex.Lock()
	defer f.isolation.mutex.Unlock()
	found := f.isolation.byID[id]
	if found == nil {
		f.T.Fatal("the session was removed")
	}
	return found
}

// stop stops the server of a session, each thread of it.
func (f *fixture) stop(id string) {
	f.T.Helper()
	f.signal(id, syscall.SIGSTOP)
	tasks := fmt.Sprintf("/proc/%d/task/*/stat", f.session(id).helper.Process.Pid)
	testkit.Eventually(f.T, "a stop", func() bool {
		files, err := filepath.Glob(tasks)
		return err == nil && len(files) > 0 && !slices.ContainsFunc(files, func(file string) bool {
			text, err := os.ReadFile(file)
			return err == nil && !strings.Contains(string(text), ") T ")
		})
	})
}

func (f *fixture) signal(id string, signal syscall.Signal) {
	f.T.Helper()
	if err := syscall.Kill(f.session(id).helper.Process.Pid, signal); err != nil {
		f.T.Fatal(err)
	}
}

// A server that is stopped answers nothing, which is as slow as it can be.
func TestAnIsolatedSessionWithARunningJobIsNotRemovedHoweverSlowItIs(t *testing.T) {
	f := newFixture(t)
	isolation := f.isolation
	place := testkit.Workspace(t)
	path, id := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": place, "mode": "rw"}, "idle_timeout_seconds": 3600})
	run := f.background(path, "until [ -e done ]; do sleep 0.01; done; exit 5")
	f.stop(id)
	isolation.expire(f.overdue(id))
	_, answer := f.Call("GET", path+"/runs/"+run, "") // which needs no answer of it
	testkit.Equal(t, true, strings.Contains(answer, `"running":true`))
	_, answer = f.Call("GET", path, "")
	testkit.Equal(t, true, strings.Contains(answer, `"status":"active"`) && strings.Contains(answer, `"idle_remaining_seconds":3600`))
	f.signal(id, syscall.SIGCONT)
	if err := os.WriteFile(place+"/done", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "its end", func() bool {
		_, answer := f.Call("GET", path+"/runs/"+run, "")
		return strings.Contains(answer, `"exit_code":5`)
	})
	testkit.Eventually(t, "its report", func() bool {
		isolation.mutex.Lock()
		defer isolation.mutex.Unlock()
		return !isolation.byID[id].held()
	})
	isolation.expire(f.session(id)) // its end was a use
	status, _ := f.Call("GET", path, "")
	testkit.Equal(t, 200, status)
	isolation.expire(f.overdue(id))
	status, _ = f.Call("GET", path, "")
	testkit.Equal(t, 404, status)
}

func TestAnIsolatedSessionWithARequestUnderWayIsNotRemoved(t *testing.T) {
	f := newFixture(t)
	isolation := f.isolation
	for _, request := range []struct{ method, path, body string }{
		{"POST", "/run", `{"code":"true"}`}, {"POST", "/files/mv", "[]"}, {"GET", "/files/info?path=/etc", ""},
	} {
		path, id := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t)}, "idle_timeout_seconds": 3600})
		active := func(expected int) func() bool {
			return func() bool {
				isolation.mutex.Lock()
				defer isolation.mutex.Unlock()
				return isolation.byID[id].active == expected
			}
		}
		f.stop(id) // so it takes long
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			f.Call(request.method, path+request.path, request.body)
		}()
		testkit.Eventually(t, "a request "+request.path, active(1))
		isolation.expire(f.overdue(id))
		f.signal(id, syscall.SIGCONT)
		<-ended
		testkit.Eventually(t, "its end", active(0)) // which was a use
		status, _ := f.Call("GET", path, "")
		testkit.Equal(t, 200, status)
	}
}

func TestAnIdleIsolatedSessionIsRemovedAlsoWhenItsServerDoesNotAnswer(t *testing.T) {
	f := newFixture(t)
	path, id := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t)}, "idle_timeout_seconds": 1})
	f.RunAt(path+"/run", testkit.Object{"code": "true"})
	f.stop(id)
	testkit.Eventually(t, "in time", func() bool { status, _ := f.Call("GET", path, ""); return status == 404 })
	testkit.Eventually(t, "nothing left", func() bool {
		left, err := os.ReadDir(f.isolation.root)
		return err == nil && len(left) == 0
	})
}

// kill ends the processes of a session and waits until that is known.
func (f *fixture) kill(id string) {
	f.T.Helper()
	killed := f.session(id)
	killed.helper.Process.SignalGroup(syscall.SIGKILL)
	<-killed.told
}

func TestTheRunsOfADeadIsolatedSessionStayReadable(t *testing.T) {
	for _, mode := range []string{"rw", "overlay"} {
		f := newFixture(t)
		path, id := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t), "mode": mode}})
		ended := f.background(path, "echo one; echo two; exit 3")
		cut := f.background(path, "echo begun; sleep 60")
		silent := f.background(path, "sleep 60")
		testkit.Eventually(t, "in time", func() bool {
			_, log := f.Call("GET", path+"/runs/"+cut+"/logs", "")
			_, status := f.Call("GET", path+"/runs/"+ended, "")
			return log == "begun\n" && strings.Contains(status, `"exit_code":3`)
		})
		_, before := f.Call("GET", path+"/runs/"+ended, "")
		f.kill(id)
		_, after := f.Call("GET", path+"/runs/"+ended, "")
		testkit.Equal(t, before, after)
		for run, log := range map[string]string{ended: "one\ntwo\n", cut: "begun\n", silent: ""} {
			response := f.Do("GET", path+"/runs/"+run+"/logs", nil)
			text, _ := io.ReadAll(response.Body)
			testkit.Equal(t, fmt.Sprint("200 ", len(log), log), fmt.Sprint(response.StatusCode, " ", response.Header.Get(tailPrefix+"CURSOR"), string(text)))
		}
		_, page := f.Call("GET", path+"/runs/"+ended+"/logs?cursor=4", "")
		testkit.Equal(t, "two\n", page)
		for _, run := range []string{cut, silent} {
			_, status := f.Call("GET", path+"/runs/"+run, "")
			testkit.Equal(t, true, strings.Contains(status, `"running":false`) && strings.Contains(status, `"error":"session terminated"`) && !strings.Contains(status, "exit_code"))
		}
		for _, unknown := range []string{"", "/logs"} {
			status, answer := f.Call("GET", path+"/runs/unknown"+unknown, "")
			testkit.Equal(t, true, status == 404 && strings.Contains(answer, "RUN_NOT_FOUND"))
		}
		status, _ := f.Call("DELETE", path, "")
		testkit.Equal(t, 200, status)
		status, answer := f.Call("GET", path+"/runs/"+ended+"/logs", "")
		testkit.Equal(t, true, status == 404 && strings.Contains(answer, "SESSION_NOT_FOUND"))
	}
}

func TestWhatIsKeptOfIsolatedRunsIsBounded(t *testing.T) {
	f := newFixture(t)
	isolation := f.isolation
	isolation.kept.files, isolation.kept.outputs.Total = 3, 2000
	path, id := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t)}})
	other, otherID := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t)}})
	logs := map[string]string{}
	write := func(session string, size int) {
		run := f.background(session, fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x", size))
		testkit.Eventually(t, "its end", func() bool {
			_, answer := f.Call("GET", session+"/runs/"+run, "")
			return strings.Contains(answer, `"exit_code":0`)
		})
		logs[fmt.Sprint(len(logs), " ", size)] = session + "/runs/" + run
	}
	kept := func() map[string]string {
		sizes := map[string]string{}
		for name, log := range logs {
			response := f.Do("GET", log+"/logs", nil)
			text, _ := io.ReadAll(response.Body)
			testkit.Equal(t, 200, response.StatusCode)
			sizes[name] = fmt.Sprint(len(text), " ", response.Header.Get(tailPrefix+"DROPPED"))
		}
		return sizes
	}
	write(other, 300)
	write(path, 600)
	write(path, 200)
	testkit.Equal(t, map[string]string{"0 300": "300 ", "1 600": "600 ", "2 200": "200 "}, kept())
	f.kill(id)
	write(other, 100) // a fourth file: the oldest of a session that has died makes room
	testkit.Equal(t, map[string]string{"0 300": "300 ", "1 600": "0 600", "2 200": "200 ", "3 100": "100 "}, kept())
	write(other, 1900) // bytes: the largest makes room for the rest of itself
	total := 0
	for _, size := range kept() {
		var bytes int
		fmt.Sscan(size, &bytes)
		total += bytes
	}
	testkit.Equal(t, true, total > 0 && total <= 2000)

	f.kill(otherID)
	dead := f.session(otherID)
	testkit.Eventually(t, "a timer although its client gave no idle time", func() bool {
		isolation.mutex.Lock()
		defer isolation.mutex.Unlock()
		return dead.timer != nil
	})
	isolation.mutex.Lock()
	dead.ended = time.Now().Add(-deadAge)
	isolation.mutex.Unlock()
	isolation.expire(dead)
	status, _ := f.Call("GET", other, "")
	testkit.Equal(t, 404, status)
	for _, run := range dead.runs {
		testkit.Equal(t, 0, run.output.Files())
	}
}

func TestDeadIsolatedSessionsMakeRoom(t *testing.T) {
	f := newFixture(t)
	isolation := f.isolation
	request := testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t), "mode": "ro"}}
	path, id := f.Isolate(request)
	older, olderID := f.Isolate(request)
	f.kill(olderID)
	f.kill(id)
	isolation.starting = sessionLimit - 2
	f.Isolate(request)
	status, _ := f.Call("GET", older, "")
	testkit.Equal(t, 404, status)
	status, _ = f.Call("GET", path, "")
	testkit.Equal(t, 200, status)
	f.Isolate(request)
	status, answer := f.Call("POST", "/v1/isolated/session", `{"workspace":{"path":"/usr","mode":"ro"}}`)
	testkit.Equal(t, true, status == 503 && strings.Contains(answer, "too many"))
	isolation.starting = 0
}

func TestAReportThatIsNotUnderstoodEndsItsSession(t *testing.T) {
	f := newFixture(t)
	run := httpx.UUID()
	begun := runReport{kind: reportBegun, run: run, at: time.Now()}
	ended := runReport{kind: reportEnded, run: run, at: time.Now()}
	memory, err := sys.MemoryFile()
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	named := func(id string) []byte { return runReport{kind: reportEnded, run: id, at: time.Now()}.encode() }
	for name, sent := range map[string]func(control *net.UnixConn, file *os.File) error{
		"another kind": func(c *net.UnixConn, _ *os.File) error {
			_, err := c.Write(append([]byte{'x'}, ended.encode()[1:]...))
			return err
		},
		"no id": func(c *net.UnixConn, _ *os.File) error {
			_, err := c.Write(named(strings.Repeat("x", uuidLength)))
			return err
		},
		"an unknown run":     func(c *net.UnixConn, _ *os.File) error { return ended.send(c, nil) },
		"no pipe":            func(c *net.UnixConn, _ *os.File) error { return begun.send(c, nil) },
		"a pipe at an end":   func(c *net.UnixConn, file *os.File) error { return ended.sendWith(c, file) },
		"no pipe but a file": func(c *net.UnixConn, _ *os.File) error { return begun.sendWith(c, memory) },
		"two begins": func(c *net.UnixConn, file *os.File) error {
			if err := begun.sendWith(c, file); err != nil {
				return err
			}
			return begun.sendWith(c, file)
		},
		"two pipes": func(c *net.UnixConn, file *os.File) error {
			_, _, err := c.WriteMsgUnix(begun.encode(), syscall.UnixRights(int(file.Fd()), int(file.Fd())), nil)
			return err
		},
		"half of one": func(c *net.UnixConn, file *os.File) error {
			_, err := c.Write(begun.encode()[:reportSize/2])
			c.Close()
			return err
		},
	} {
		ours, theirs, err := sys.SocketPair()
		if err != nil {
			t.Fatal(err)
		}
		control, err := sys.UnixConn(ours)
		if err != nil {
			t.Fatal(err)
		}
		peer, err := sys.UnixConn(theirs)
		if err != nil {
			t.Fatal(err)
		}
		null, err := process.OpenNull()
		if err != nil {
			t.Fatal(err)
		}
		child, err := testhost.Reaper.Start(process.Spec{Path: "/bin/sleep", Argv: []string{"sleep", "60"}, Dir: "/", Files: [3]uintptr{null.Fd(), 2, 2}})
		null.Close()
		if err != nil {
			t.Fatal(err)
		}
		session := &session{
			id: httpx.UUID(), request: &request{}, helper: helper.New(child, control, log.New(io.Discard, "", 0)),
			runs: map[string]*backgroundRun{}, told: make(chan struct{}), changed: make(chan struct{}),
		}
		file, write, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		go f.isolation.follow(session)
		if err := sent(peer, file); err != nil {
			t.Fatal(name, err)
		}
		select {
		case <-session.told:
		case <-time.After(10 * time.Second):
			t.Fatal(name + ": the session goes on")
		}
		testkit.Equal(t, syscall.SIGKILL, child.Status.Signal())
		for _, run := range session.runs {
			run.output.Close()
		}
		for _, closing := range []io.Closer{file, write, peer, control} {
			closing.Close()
		}
	}
}

func TestAReportArrivesInAnyPieces(t *testing.T) {
	ours, theirs, err := sys.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	control, err := sys.UnixConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	peer, err := sys.UnixConn(theirs)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	file, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	defer write.Close()
	if _, err := write.WriteString("output"); err != nil {
		t.Fatal(err)
	}
	reports := []runReport{
		{reportBegun, httpx.UUID(), 0, time.Unix(1, 2)}, {reportEnded, httpx.UUID(), 0x0300, time.Unix(3, 4)},
		{reportEnded, httpx.UUID(), syscall.WaitStatus(syscall.SIGKILL), time.Unix(5, 6)},
	}
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for _, report := range reports {
			text := report.encode()
			for piece := range slices.Chunk(text, 7) {
				var rights []byte
				if report.kind == reportBegun && &piece[0] == &text[0] {
					rights = syscall.UnixRights(int(file.Fd()))
				}
				_, _, _ = peer.WriteMsgUnix(piece, rights, nil)
			}
		}
		peer.Close()
	}()
	for _, expected := range reports {
		report, output, err := receiveReport(control)
		testkit.Equal(t, nil, err)
		testkit.Equal(t, true, report.at.Equal(expected.at))
		testkit.Equal(t, fmt.Sprint(expected.kind, expected.run, expected.status), fmt.Sprint(report.kind, report.run, report.status))
		testkit.Equal(t, expected.kind == reportBegun, output != nil)
		if output != nil {
			text := make([]byte, 6)
			_, err := io.ReadFull(output, text)
			testkit.Equal(t, "output <nil>", fmt.Sprint(string(text), " ", err))
			output.Close()
		}
	}
	_, _, err = receiveReport(control)
	testkit.Equal(t, true, errors.Is(err, io.EOF))
	<-sent
}

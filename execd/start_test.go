package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// ownReaper is the one of the test process.
var ownReaper = func() *Reaper { return testReaper }

// startTrue starts a program that does nothing and waits for its end.
func startTrue(tb testing.TB, reaper *Reaper) {
	tb.Helper()
	process, err := reaper.Start(Spec{Path: "/bin/true", Argv: []string{"true"}, Dir: "/", Files: [3]uintptr{0, 1, 2}})
	if err != nil {
		tb.Fatal(err)
	}
	<-process.Done
}

func BenchmarkStart(b *testing.B) {
	held := ownReaper().admin
	for _, admin := range []bool{false, true} {
		if admin && !held {
			continue
		}
		b.Run(fmt.Sprint("capability=", admin), func(b *testing.B) {
			ownReaper().admin = admin
			defer func() { ownReaper().admin = held }()
			for b.Loop() {
				startTrue(b, ownReaper())
			}
		})
	}
}

// threadIDs lists the threads of this process.
func threadIDs(t *testing.T) map[string]bool {
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]bool{}
	for _, entry := range entries {
		ids[entry.Name()] = true
	}
	return ids
}

func TestAStartCostsNoThread(t *testing.T) {
	equal(t, true, ownReaper().admin)
	reserveThreads()
	for range 20 {
		startTrue(t, ownReaper())
	}
	before := threadIDs(t)
	for range 200 {
		startTrue(t, ownReaper())
	}
	for id := range before {
		if !threadIDs(t)[id] {
			t.Errorf("thread %s ended", id)
		}
	}
}

// mounting lists the sets of a process's status that have CAP_SYS_ADMIN or CAP_SETPCAP.
func mounting(t *testing.T, status string) (sets []string) {
	t.Helper()
	const setPCap, admin = 8, 21
	seen := 0
	for line := range strings.Lines(status) {
		name, digits, found := strings.Cut(strings.TrimSpace(line), ":\t")
		if !found || !strings.HasPrefix(name, "Cap") {
			continue
		}
		set, err := strconv.ParseUint(digits, 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		seen++
		if set&(1<<admin|1<<setPCap) != 0 {
			sets = append(sets, name)
		}
	}
	equal(t, 5, seen)
	return sets
}

// statusOfThreads reads the status of every thread of a process.
func statusOfThreads(t *testing.T, pid int) (all []string) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(tasks) == 0 {
		t.Fatal("no threads")
	}
	for _, task := range tasks {
		all = append(all, mustRead(t, task))
	}
	return all
}

func TestNoChildHasTheCapabilityInAnySet(t *testing.T) {
	f := newFixture(t)
	program := opened(t) + "/setuid-grep"
	text, err := os.ReadFile("/bin/grep")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, text, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(program, 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	const own = " ^Cap /proc/self/status"
	for _, request := range []object{
		{"command": "grep" + own}, {"command": program + own}, {"command": program + own, "uid": 65051, "gid": 65051},
	} {
		equal(t, nil, mounting(t, strings.Join(f.run(request).stdout, "\n")))
	}
	path, _ := f.isolate(object{"workspace": object{"path": workspace(t)}})
	equal(t, nil, mounting(t, strings.Join(f.runAt(path+"/run", object{"code": "grep" + own}).stdout, "\n")))
	status, _ := f.call("GET", "/v1/filesystem/0/0/files/info?path=/", "")
	equal(t, 200, status)
	seen := map[string]bool{}
	for pid, line := range children(t) {
		for _, flag := range []string{helperFlag, isolateFlag} {
			if !strings.HasSuffix(line, " "+flag) {
				continue
			}
			seen[flag] = true
			for _, status := range statusOfThreads(t, pid) {
				equal(t, nil, mounting(t, status))
			}
		}
	}
	equal(t, 2, len(seen))
	equal(t, true, mounting(t, mustRead(t, "/proc/self/status")) != nil) // the daemon keeps it
}

func TestOnlyThisProgramStartsInNamespaces(t *testing.T) {
	_, err := ownReaper().Start(Spec{Path: "/bin/true", Argv: []string{"true"}, Namespaces: syscall.CLONE_NEWPID})
	equal(t, true, errors.Is(err, syscall.EPERM))
}

func TestAProgramPutInPlaceOfTheDaemonIsNotStarted(t *testing.T) {
	directory := opened(t)
	above, planted := directory+"/above", directory+"/planted"
	if err := os.Mkdir(above, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(testBinary(t), above+"/execd"); err != nil {
		t.Fatal(err)
	}
	_, url, _ := daemonUnder(t, []string{"EXECD_ACCESS_TOKEN=" + testToken}, []string{above + "/execd"})
	eventually(t, "an answer", answers(url))
	err := os.Rename(above, directory+"/moved")
	if err == nil {
		err = os.Mkdir(above, 0o755)
	}
	if err == nil {
		err = os.WriteFile(above+"/execd", []byte("#!/bin/sh\ntouch "+planted+"; printf + >&3\n"), 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	client := http.Client{Timeout: 20 * time.Second}
	request, _ := http.NewRequest("GET", url+"/v1/filesystem/65061/65061/files/info?path=/", nil)
	request.Header.Set(tokenHeader, testToken)
	response, err := client.Do(request)
	if _, missing := os.Stat(planted); missing == nil {
		t.Fatal("the planted program was started")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	equal(t, 200, response.StatusCode)
}

func TestThisProgramStartsWhereAThreadMayHaveNoDirectoryOfItsOwn(t *testing.T) {
	confined := &forker{}
	confined.once.Do(confined.begin)
	confined.shared = true
	program, err := ThisProgram()
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	process, err := ownReaper().Adopt(func() (int, error) {
		return confined.fork(&Spec{Again: program, Argv: []string{"execd", "--no-such-flag"}, Files: [3]uintptr{0, 1, 2}})
	})
	if err != nil {
		t.Fatal(err)
	}
	<-process.Done
	equal(t, 2, exitNumber(process.Status)) // of a program that does not know the flag
}

func TestTheProcessFileSystemIsNotTakenOnTrust(t *testing.T) {
	directory := t.TempDir()
	link := directory + "/link"
	if err := os.Symlink("/proc", link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{directory, link, directory + "/none", "/proc/version"} {
		if fd, err := openProc(path); err == nil {
			syscall.Close(fd)
			t.Errorf("%s was taken", path)
		}
	}
}

func TestAnAnswerIsTakenFromTheHelperAlone(t *testing.T) {
	own := syscall.Ucred{Pid: int32(os.Getpid()), Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())}
	for name, each := range map[string]struct {
		expected syscall.Ucred
		answer   string
		failure  string
	}{
		"its own":          {own, helperReady, ""},
		"a failure":        {own, "no such view", "no such view"},
		"more than ready":  {own, helperReady + "\n", helperReady + "\n"},
		"another process":  {syscall.Ucred{Pid: own.Pid + 1, Uid: own.Uid, Gid: own.Gid}, helperReady, "another process answered"},
		"another identity": {syscall.Ucred{Pid: own.Pid, Uid: own.Uid + 1, Gid: own.Gid}, helperReady, "its helper has another identity"},
		"none":             {own, "", "its helper ended"},
	} {
		ours, theirs, err := socketPair()
		if err == nil {
			err = syscall.SetsockoptInt(int(ours.Fd()), syscall.SOL_SOCKET, syscall.SO_PASSCRED, 1)
		}
		if err != nil {
			t.Fatal(err)
		}
		control, err := unixConn(ours)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = theirs.WriteString(each.answer)
		theirs.Close()
		err = awaitHelper(control, each.expected)
		control.Close()
		if text := fmt.Sprint(err); text != each.failure && (err != nil || each.failure != "") {
			t.Errorf("%s: %s", name, text)
		}
	}
}

func TestAnIdentityHasOneClock(t *testing.T) {
	f := newFilesFixture(t)
	chosen := identity{65071, 65071}
	measure := func() uint64 {
		var memory runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&memory)
		return memory.HeapAlloc
	}
	use := func(times int) {
		for range times {
			taken, err := f.identities.take(chosen)
			if err != nil {
				t.Fatal(err)
			}
			f.identities.giveBack(chosen, taken)
		}
	}
	use(1)
	before := measure()
	use(50_000)
	if after := measure(); after > before+1<<20 {
		t.Errorf("%d bytes are kept for requests that are over", after-before)
	}
}

func TestAnIdleIdentityEndsAndAUsedOneDoesNot(t *testing.T) {
	f := newFilesFixture(t)
	identities := f.identities
	identities.idle = 300 * time.Millisecond
	kept, left := identity{65081, 65081}, identity{65082, 65082}
	used, err := identities.take(kept)
	if err != nil {
		t.Fatal(err)
	}
	identities.giveBack(kept, used)
	if used, err = identities.take(kept); err != nil { // its clock goes, but it is in use
		t.Fatal(err)
	}
	idle, err := identities.take(left)
	if err != nil {
		t.Fatal(err)
	}
	identities.giveBack(left, idle)
	<-idle.process.Done
	select {
	case <-used.process.Done:
		t.Fatal("a helper that was in use ended")
	default:
	}
	identities.giveBack(kept, used)
	<-used.process.Done
	identities.mutex.Lock()
	defer identities.mutex.Unlock()
	equal(t, 0, len(identities.helpers))
}

func TestAGroupIsNotMistakenForALaterOne(t *testing.T) {
	process, err := ownReaper().Start(Spec{Path: "/bin/sleep", Argv: []string{"sleep", "60"}, Dir: "/", Files: [3]uintptr{0, 1, 2}})
	if err != nil {
		t.Fatal(err)
	}
	held, ok := process.hold()
	equal(t, true, ok)
	defer held.release()
	equal(t, true, held.signal(syscall.SIGKILL))
	<-process.Done
	_, ok = process.hold()
	equal(t, false, ok)
	if held.fd < 0 { // this kernel knows groups by their number only
		equal(t, false, held.signal(0))
		return
	}
	// Another process may be given the number first.
	printed := t.TempDir() + "/printed"
	output, err := os.Create(printed)
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	shell, err := ownReaper().Start(Spec{
		Path: "/bin/sh", Argv: []string{"sh", "-c", fmt.Sprintf(`for try in $(seq 1000); do
echo %d >/proc/sys/kernel/ns_last_pid; setsid sleep 60 >/dev/null 2>&1 & [ $! = %[2]d ] && break; kill -9 $!; done; echo $!`,
			process.Pid-1, process.Pid)},
		Dir: "/", Env: os.Environ(), Files: [3]uintptr{0, output.Fd(), 2},
	})
	if err != nil {
		t.Fatal(err)
	}
	<-shell.Done
	defer syscall.Kill(-process.Pid, syscall.SIGKILL)
	equal(t, strconv.Itoa(process.Pid), strings.TrimSpace(mustRead(t, printed)))
	eventually(t, "a group with that number", func() bool { return syscall.Kill(-process.Pid, 0) == nil })
	equal(t, false, held.signal(syscall.SIGKILL))
	equal(t, nil, syscall.Kill(-process.Pid, 0))
}

func TestTheRestOfAGroupIsEndedAfterItsLeader(t *testing.T) {
	ready := t.TempDir() + "/ready"
	process, err := ownReaper().Start(Spec{
		Path: "/bin/sh", Argv: []string{"sh", "-c", "trap 'exit 0' TERM; (trap '' TERM; touch $0; exec sleep 60) & wait", ready}, Dir: "/",
		Env: os.Environ(), Files: [3]uintptr{0, 1, 2},
	})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "its end can be asked for", func() bool { _, err := os.Stat(ready); return err == nil })
	process.Terminate(200 * time.Millisecond)
	<-process.Done
	eventually(t, "the group is gone", func() bool { return syscall.Kill(-process.Pid, 0) != nil })
}

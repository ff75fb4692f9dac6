package process

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"sallyport.dev/execd/internal/testkit"
	"sync"
)

// ownReaper is the one of the test process.
var ownReaper = sync.OnceValue(NewReaper)

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
	testkit.Equal(t, true, ownReaper().admin)
	ReserveThreads()
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

func TestOnlyThisProgramStartsInNamespaces(t *testing.T) {
	_, err := ownReaper().Start(Spec{Path: "/bin/true", Argv: []string{"true"}, Namespaces: syscall.CLONE_NEWPID})
	testkit.Equal(t, true, errors.Is(err, syscall.EPERM))
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
	testkit.Equal(t, 2, ExitNumber(process.Status)) // of a program that does not know the flag
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

func TestAGroupIsNotMistakenForALaterOne(t *testing.T) {
	process, err := ownReaper().Start(Spec{Path: "/bin/sleep", Argv: []string{"sleep", "60"}, Dir: "/", Files: [3]uintptr{0, 1, 2}})
	if err != nil {
		t.Fatal(err)
	}
	held, ok := process.Hold()
	testkit.Equal(t, true, ok)
	defer held.Release()
	testkit.Equal(t, true, held.Signal(syscall.SIGKILL))
	<-process.Done
	_, ok = process.Hold()
	testkit.Equal(t, false, ok)
	if held.fd < 0 { // this kernel knows groups by their number only
		testkit.Equal(t, false, held.Signal(0))
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
	testkit.Equal(t, strconv.Itoa(process.Pid), strings.TrimSpace(testkit.MustRead(t, printed)))
	testkit.Eventually(t, "a group with that number", func() bool { return syscall.Kill(-process.Pid, 0) == nil })
	testkit.Equal(t, false, held.Signal(syscall.SIGKILL))
	testkit.Equal(t, nil, syscall.Kill(-process.Pid, 0))
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
	testkit.Eventually(t, "its end can be asked for", func() bool { _, err := os.Stat(ready); return err == nil })
	process.Terminate(200 * time.Millisecond)
	<-process.Done
	testkit.Eventually(t, "the group is gone", func() bool { return syscall.Kill(-process.Pid, 0) != nil })
}

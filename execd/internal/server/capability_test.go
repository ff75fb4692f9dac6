package server

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/files"
	"sallyport.dev/execd/internal/isolate"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

// mounting returns the capability sets of a process's status that contain CAP_SYS_ADMIN or CAP_SETPCAP.
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
	testkit.Equal(t, 5, seen)
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
		all = append(all, testkit.MustRead(t, task))
	}
	return all
}

func TestNoChildHasTheCapabilityInAnySet(t *testing.T) {
	f := newFixture(t)
	program := testkit.Opened(t) + "/setuid-grep"
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
	for _, request := range []testkit.Object{
		{"command": "grep" + own}, {"command": program + own}, {"command": program + own, "uid": 65051, "gid": 65051},
	} {
		testkit.Equal(t, nil, mounting(t, strings.Join(f.Run(request).Stdout, "\n")))
	}
	path, _ := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t)}})
	testkit.Equal(t, nil, mounting(t, strings.Join(f.RunAt(path+"/run", testkit.Object{"code": "grep" + own}).Stdout, "\n")))
	status, _ := f.Call("GET", "/v1/filesystem/0/0/files/info?path=/", "")
	testkit.Equal(t, 200, status)
	seen := map[string]bool{}
	for pid, line := range testhost.Children(t) {
		for _, flag := range []string{files.HelperFlag, isolate.Flag} {
			if !strings.HasSuffix(line, " "+flag) {
				continue
			}
			seen[flag] = true
			for _, status := range statusOfThreads(t, pid) {
				testkit.Equal(t, nil, mounting(t, status))
			}
		}
	}
	testkit.Equal(t, 2, len(seen))
	// The daemon itself keeps its capabilities.
	testkit.Equal(t, true, mounting(t, testkit.MustRead(t, "/proc/self/status")) != nil)
}

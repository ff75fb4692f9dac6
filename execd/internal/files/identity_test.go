package files

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"mime/multipart"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/testkit"
)

func (f *fixture) upload(prefix, path string, content []byte) (int, string) {
	f.T.Helper()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	metadata, _ := form.CreateFormFile("metadata", "metadata")
	fmt.Fprintf(metadata, `{"path":%q,"owner":null,"group":null,"mode":640}`, path)
	file, _ := form.CreateFormFile("file", "f")
	_, _ = file.Write(content)
	form.Close()
	response := f.Do("POST", prefix+"/files/upload", &body, "Content-Type", form.FormDataContentType())
	text, _ := io.ReadAll(response.Body)
	return response.StatusCode, string(text)
}

func TestFilesOfAnIdentityAreItsOwnAndTheKernelDecides(t *testing.T) {
	f := newFixture(t)
	directory := testkit.Opened(t)
	as := func(uid, gid int) string { return fmt.Sprintf("/v1/filesystem/%d/%d", uid, gid) }
	content := make([]byte, 3<<20)
	_, _ = rand.Read(content)
	status, answer := f.upload(as(65011, 65012), directory+"/mine", content)
	testkit.Equal(t, "200 ", fmt.Sprint(status, " ", answer))
	info, err := os.Stat(directory + "/mine")
	if err != nil {
		t.Fatal(err)
	}
	owner := info.Sys().(*syscall.Stat_t)
	testkit.Equal(t, []uint32{65011, 65012, 0o640}, []uint32{owner.Uid, owner.Gid, owner.Mode & 0o7777})
	status, answer = f.Call("GET", as(65011, 65012)+"/files/download?path="+directory+"/mine", "")
	testkit.Equal(t, true, status == 200 && answer == string(content))
	status, _ = f.Call("GET", as(65021, 65022)+"/files/download?path="+directory+"/mine", "")
	testkit.Equal(t, 500, status)
	// the group has permission to read
	status, _ = f.Call("GET", as(65021, 65012)+"/files/download?path="+directory+"/mine", "")
	testkit.Equal(t, 200, status)
	status, _ = f.Call("GET", as(65021, 65022)+"/files/download?path=/etc/shadow", "")
	testkit.Equal(t, 500, status)
	status, _ = f.Call("POST", as(65021, 65022)+"/files/permissions", `{"`+directory+`/mine":{"mode":777}}`)
	testkit.Equal(t, 500, status)
	status, _ = f.Call("POST", as(65011, 65012)+"/directories", `{"`+directory+`/sub":{"mode":700}}`)
	testkit.Equal(t, 200, status)
	status, answer = f.Call("GET", as(65021, 65022)+"/directories/list?path="+directory+"/sub", "")
	testkit.Equal(t, true, status == 500 && strings.Contains(answer, `"code"`))
	status, _ = f.Call("GET", as(65011, 65012)+"/files/info?path="+directory+"/none", "")
	testkit.Equal(t, 404, status)
}

func TestAHelperHasNothingOfTheDaemon(t *testing.T) {
	f := newFixture(t)
	helper, err := f.identities.take(identity{65031, 65032})
	if err != nil {
		t.Fatal(err)
	}
	defer f.identities.giveBack(identity{65031, 65032}, helper)
	status, _ := f.Call("GET", "/v1/filesystem/65031/65032/files/info?path=/", "")
	testkit.Equal(t, 200, status)
	place := fmt.Sprintf("/proc/%d", helper.Process.Pid)
	environ, err := os.ReadFile(place + "/environ")
	testkit.Equal(t, "", string(environ))
	if err != nil {
		t.Fatal(err)
	}
	text, _ := os.ReadFile(place + "/status")
	for _, line := range []string{"Uid:\t65031\t65031\t65031\t65031", "Gid:\t65032\t65032\t65032\t65032", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"} {
		testkit.Equal(t, true, strings.Contains(string(text), line+"\n"))
	}
	testkit.Equal(t, true, strings.Contains(string(text), "Groups:\t \n") || strings.Contains(string(text), "Groups:\t65032 \n"))
	entries, _ := os.ReadDir(place + "/fd")
	for _, entry := range entries {
		target, _ := os.Readlink(place + "/fd/" + entry.Name())
		if !strings.HasPrefix(target, "socket:") && !strings.HasPrefix(target, "anon_inode:") && !strings.HasPrefix(target, "/dev/null") &&
			entry.Name() != "1" && entry.Name() != "2" && !strings.HasPrefix(target, "/sys/fs/cgroup") {
			t.Fatalf("descriptor %s: %s", entry.Name(), target)
		}
	}
}

func TestIdentityPathsAreHomeAndRootOfTheAccount(t *testing.T) {
	f := newFixture(t)
	status, answer := f.Call("GET", "/v1/filesystem/0/0/files/info?path=~", "")
	testkit.Equal(t, true, status == 200 && strings.Contains(answer, `"path":"/root"`))
	status, answer = f.Call("GET", "/v1/filesystem/65041/65041/files/info?path=~&path=etc&path=$FIXTURE", "")
	testkit.Equal(t, 404, status) // a variable of the daemon is not replaced
	testkit.Equal(t, true, strings.Contains(answer, "$FIXTURE"))
	status, answer = f.Call("GET", "/v1/filesystem/65041/65041/files/info?path=~&path=etc", "")
	testkit.Equal(t, true, status == 200 && strings.Contains(answer, `"path":"/etc"`) && strings.Contains(answer, `"path":"/"`))
}

func TestIdentityRoutesThatAreNone(t *testing.T) {
	f := newFixture(t)
	for path, expected := range map[string]int{
		"/v1/filesystem/-1/0/files/info": 400, "/v1/filesystem/+1/0/files/info": 400, "/v1/filesystem/4294967295/0/files/info": 400,
		"/v1/filesystem/a/b/files/info": 400, "/v1/filesystem//0/files/info": 400, "/v1/filesystem/0/0/command": 404,
		"/v1/filesystem/0/0/ping": 404, "/v1/filesystem/0/0/v1/filesystem/0/0/files/info": 404, "/v1/filesystem/0/0": 404,
	} {
		status, _ := f.Call("GET", path, "")
		testkit.Equal(t, fmt.Sprint(path, " ", expected), fmt.Sprint(path, " ", status))
	}
}

func TestHelpersAreBoundedReplacedAndEndWithTheirControl(t *testing.T) {
	f := newFixture(t)
	identities := f.identities
	var calls sync.WaitGroup
	for n := range 3 * helperLimit {
		calls.Go(func() {
			status, _ := f.Call("GET", fmt.Sprintf("/v1/filesystem/%d/1/files/info?path=/", 65100+n), "")
			if status != 200 && status != 503 {
				t.Errorf("status %d", status)
			}
		})
	}
	calls.Wait()
	testkit.Equal(t, true, len(identities.helpers) <= helperLimit)
	chosen := identity{65100, 2}
	first, err := identities.take(chosen)
	if err != nil {
		t.Fatal(err)
	}
	identities.giveBack(chosen, first)
	first.Process.SignalGroup(syscall.SIGKILL)
	<-first.Process.Done
	status, _ := f.Call("GET", "/v1/filesystem/65100/2/files/info?path=/", "")
	testkit.Equal(t, 200, status)
	var all []*process.Process
	for _, running := range identities.helpers {
		all = append(all, running.Process)
		running.Control.Close()
	}
	for _, child := range all {
		<-child.Done
	}
}

func TestAnIdentityHasOneClock(t *testing.T) {
	f := newFixture(t)
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
	f := newFixture(t)
	identities := f.identities
	identities.idle = 300 * time.Millisecond
	kept, left := identity{65081, 65081}, identity{65082, 65082}
	used, err := identities.take(kept)
	if err != nil {
		t.Fatal(err)
	}
	identities.giveBack(kept, used)
	if used, err = identities.take(kept); err != nil { // its timer runs, but the helper is in use
		t.Fatal(err)
	}
	idle, err := identities.take(left)
	if err != nil {
		t.Fatal(err)
	}
	identities.giveBack(left, idle)
	<-idle.Process.Done
	select {
	case <-used.Process.Done:
		t.Fatal("a helper that was in use ended")
	default:
	}
	identities.giveBack(kept, used)
	<-used.Process.Done
	identities.mutex.Lock()
	defer identities.mutex.Unlock()
	testkit.Equal(t, 0, len(identities.helpers))
}

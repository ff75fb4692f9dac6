package main

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"mime/multipart"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
)

func (f *filesFixture) upload(prefix, path string, content []byte) (int, string) {
	f.t.Helper()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	metadata, _ := form.CreateFormFile("metadata", "metadata")
	fmt.Fprintf(metadata, `{"path":%q,"owner":null,"group":null,"mode":640}`, path)
	file, _ := form.CreateFormFile("file", "f")
	_, _ = file.Write(content)
	form.Close()
	response := f.do("POST", prefix+"/files/upload", &body, "Content-Type", form.FormDataContentType())
	text, _ := io.ReadAll(response.Body)
	return response.StatusCode, string(text)
}

func TestFilesOfAnIdentityAreItsOwnAndTheKernelDecides(t *testing.T) {
	f := newFilesFixture(t)
	directory := opened(t)
	as := func(uid, gid int) string { return fmt.Sprintf("/v1/filesystem/%d/%d", uid, gid) }
	content := make([]byte, 3<<20)
	_, _ = rand.Read(content)
	status, answer := f.upload(as(65011, 65012), directory+"/mine", content)
	equal(t, "200 ", fmt.Sprint(status, " ", answer))
	info, err := os.Stat(directory + "/mine")
	if err != nil {
		t.Fatal(err)
	}
	owner := info.Sys().(*syscall.Stat_t)
	equal(t, []uint32{65011, 65012, 0o640}, []uint32{owner.Uid, owner.Gid, owner.Mode & 0o7777})
	status, answer = f.call("GET", as(65011, 65012)+"/files/download?path="+directory+"/mine", "")
	equal(t, true, status == 200 && answer == string(content))
	status, _ = f.call("GET", as(65021, 65022)+"/files/download?path="+directory+"/mine", "")
	equal(t, 500, status)
	status, _ = f.call("GET", as(65021, 65012)+"/files/download?path="+directory+"/mine", "") // the group may read
	equal(t, 200, status)
	status, _ = f.call("GET", as(65021, 65022)+"/files/download?path=/etc/shadow", "")
	equal(t, 500, status)
	status, _ = f.call("POST", as(65021, 65022)+"/files/permissions", `{"`+directory+`/mine":{"mode":777}}`)
	equal(t, 500, status)
	status, _ = f.call("POST", as(65011, 65012)+"/directories", `{"`+directory+`/sub":{"mode":700}}`)
	equal(t, 200, status)
	status, answer = f.call("GET", as(65021, 65022)+"/directories/list?path="+directory+"/sub", "")
	equal(t, true, status == 500 && strings.Contains(answer, `"code"`))
	status, _ = f.call("GET", as(65011, 65012)+"/files/info?path="+directory+"/none", "")
	equal(t, 404, status)
}

func TestAHelperHasNothingOfTheDaemon(t *testing.T) {
	f := newFilesFixture(t)
	helper, err := f.identities.take(identity{65031, 65032})
	if err != nil {
		t.Fatal(err)
	}
	defer f.identities.giveBack(identity{65031, 65032}, helper)
	status, _ := f.call("GET", "/v1/filesystem/65031/65032/files/info?path=/", "")
	equal(t, 200, status)
	place := fmt.Sprintf("/proc/%d", helper.process.Pid)
	environ, err := os.ReadFile(place + "/environ")
	equal(t, "", string(environ))
	if err != nil {
		t.Fatal(err)
	}
	text, _ := os.ReadFile(place + "/status")
	for _, line := range []string{"Uid:\t65031\t65031\t65031\t65031", "Gid:\t65032\t65032\t65032\t65032", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"} {
		equal(t, true, strings.Contains(string(text), line+"\n"))
	}
	equal(t, true, strings.Contains(string(text), "Groups:\t \n") || strings.Contains(string(text), "Groups:\t65032 \n"))
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
	f := newFilesFixture(t)
	status, answer := f.call("GET", "/v1/filesystem/0/0/files/info?path=~", "")
	equal(t, true, status == 200 && strings.Contains(answer, `"path":"/root"`))
	status, answer = f.call("GET", "/v1/filesystem/65041/65041/files/info?path=~&path=etc&path=$FIXTURE", "")
	equal(t, 404, status) // a variable of the daemon is a name here
	equal(t, true, strings.Contains(answer, "$FIXTURE"))
	status, answer = f.call("GET", "/v1/filesystem/65041/65041/files/info?path=~&path=etc", "")
	equal(t, true, status == 200 && strings.Contains(answer, `"path":"/etc"`) && strings.Contains(answer, `"path":"/"`))
}

func TestIdentityRoutesThatAreNone(t *testing.T) {
	f := newFilesFixture(t)
	for path, expected := range map[string]int{
		"/v1/filesystem/-1/0/files/info": 400, "/v1/filesystem/+1/0/files/info": 400, "/v1/filesystem/4294967295/0/files/info": 400,
		"/v1/filesystem/a/b/files/info": 400, "/v1/filesystem//0/files/info": 400, "/v1/filesystem/0/0/command": 404,
		"/v1/filesystem/0/0/ping": 404, "/v1/filesystem/0/0/v1/filesystem/0/0/files/info": 404, "/v1/filesystem/0/0": 404,
	} {
		status, _ := f.call("GET", path, "")
		equal(t, fmt.Sprint(path, " ", expected), fmt.Sprint(path, " ", status))
	}
}

func TestHelpersAreBoundedReplacedAndEndWithTheirControl(t *testing.T) {
	f := newFilesFixture(t)
	identities := f.identities
	var calls sync.WaitGroup
	for n := range 3 * helperLimit {
		calls.Go(func() {
			status, _ := f.call("GET", fmt.Sprintf("/v1/filesystem/%d/1/files/info?path=/", 65100+n), "")
			if status != 200 && status != 503 {
				t.Errorf("status %d", status)
			}
		})
	}
	calls.Wait()
	equal(t, true, len(identities.helpers) <= helperLimit)
	chosen := identity{65100, 2}
	first, err := identities.take(chosen)
	if err != nil {
		t.Fatal(err)
	}
	identities.giveBack(chosen, first)
	first.process.SignalGroup(syscall.SIGKILL)
	<-first.process.Done
	status, _ := f.call("GET", "/v1/filesystem/65100/2/files/info?path=/", "")
	equal(t, 200, status)
	var all []*Process
	for _, running := range identities.helpers {
		all = append(all, running.process)
		running.control.Close()
	}
	for _, process := range all {
		<-process.Done
	}
}

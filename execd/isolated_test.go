package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// isolate makes a session and returns its path and its id.
func (f *fixture) isolate(request object) (path, id string) {
	f.t.Helper()
	body, _ := json.Marshal(request)
	status, answer := f.call("POST", "/v1/isolated/session", string(body))
	var made struct {
		ID string `json:"session_id"`
	}
	if err := json.Unmarshal([]byte(answer), &made); status != 201 || err != nil || made.ID == "" {
		f.t.Fatalf("no session: %d %s", status, answer)
	}
	f.t.Cleanup(func() { f.server.isolation.remove(made.ID) })
	return "/v1/isolated/session/" + made.ID, made.ID
}

// workspace is a directory outside /tmp with one file.
func workspace(t *testing.T) string {
	directory, err := os.MkdirTemp("/var/tmp", "execd-workspace-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	if err := os.WriteFile(directory+"/file", []byte("below"), 0o644); err != nil {
		t.Fatal(err)
	}
	return directory
}

func TestIsolatedSessionWritesToItsOwnLayerOnly(t *testing.T) {
	f := newFixture(t)
	ws := workspace(t)
	path, id := f.isolate(object{"workspace": object{"path": ws}})
	run := f.runAt(path+"/run", object{"code": `pwd; cat file; echo; echo above >file; echo new >made; n=1; ps() { echo $$; }
touch /etc/execd-test 2>/dev/null || echo read-only; echo hidden >/tmp/execd-isolated; ls ` + f.server.isolation.root + ` | wc -l
[ -z "$EXECD_ENVS" ] && echo without; kill -9 1; echo $PPID`, "envs": object{"GIVEN": "v'1"}})
	equal(t, []string{ws, "below", "read-only", "0", "without", "1"}, run.stdout)
	equal(t, "execution_complete", run.last.Type)
	equal(t, []string{"1 above gone"}, f.runAt(path+"/run", object{"code": `echo $n $(cat file) ${GIVEN-gone}`}).stdout)
	equal(t, "below", mustRead(t, ws+"/file"))
	for _, name := range []string{ws + "/made", "/tmp/execd-isolated"} {
		if _, err := os.Stat(name); err == nil {
			t.Fatal(name + " can be seen outside")
		}
	}
	status, body := f.call("GET", path+"/files/download?path="+ws+"/file", "")
	equal(t, "200 above\n", fmt.Sprint(status, " ", body))
	status, body = f.call("POST", path+"/files/replace", `{"`+ws+`/file":{"old":"above","new":"again"}}`)
	equal(t, `200 {"`+ws+`/file":{"replacedCount":1}}`, fmt.Sprint(status, " ", body))
	status, body = f.call("GET", path, "")
	equal(t, true, status == 200 && strings.Contains(body, `"status":"active"`) && strings.Contains(body, `"workspace":{"path":"`+ws+`","mode":"overlay"}`))
	status, body = f.call("GET", "/v1/isolated/sessions", "")
	equal(t, true, status == 200 && strings.Contains(body, id))
	status, _ = f.call("DELETE", path, "")
	equal(t, 200, status)
	status, body = f.call("DELETE", path, "")
	equal(t, true, status == 404 && strings.Contains(body, "SESSION_NOT_FOUND"))
	left, _ := os.ReadDir(f.server.isolation.root)
	equal(t, 0, len(left))
	equal(t, "below", mustRead(t, ws+"/file"))
}

func TestIsolatedSessionsMountWhatIsAskedForAndNothingElse(t *testing.T) {
	f := newFixture(t)
	first, second := workspace(t), workspace(t)
	if err := os.Mkdir(first+"/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	path, _ := f.isolate(object{
		"overlays": []object{{"path": first, "mode": "rw"}, {"path": first + "/sub", "mode": "ro"}, {"path": second, "persist": false}},
		"uid":      1234, "gid": 1235, "share_net": false, "profile": "balanced",
		"env_passthrough": object{"mode": "allow", "keys": []string{"PATH", "FIXTURE"}},
	})
	if err := os.Chmod(first, 0o777); err != nil {
		t.Fatal(err)
	}
	run := f.runAt(path+"/run", object{"code": `id -u; id -g; echo through >made; touch sub/x 2>/dev/null || echo sub read-only
env | cut -d= -f1 | grep -vE '^(_|PWD|SHLVL)$' | sort | tr '\n' ' '; echo; grep -c : /proc/net/dev; grep CapEff /proc/self/status
mount -t tmpfs x /mnt 2>/dev/null || echo no mounts`})
	equal(t, []string{"1234", "1235", "sub read-only", "FIXTURE PATH ", "1", "CapEff:\t0000000000000000", "no mounts"}, run.stdout)
	equal(t, "through\n", mustRead(t, first+"/made"))
	for request, expected := range map[string]int{
		`{}`: 400, `{"workspace":{"path":"relative"}}`: 400, `{"workspace":{"path":"/var/../etc"}}`: 400,
		`{"workspace":{"path":"/proc"}}`: 400, `{"workspace":{"path":"/"}}`: 400, `{"workspace":{"path":"/nowhere"}}`: 400,
		`{"workspace":{"path":"` + first + `","mode":"rwx"}}`: 400, `{"workspace":{"path":"` + first + `"},"profile":"loose"}`: 400,
		`{"workspace":{"path":"` + first + `"},"overlays":[{"path":"` + first + `"}]}`:                                         400,
		`{"workspace":{"path":"` + first + `"},"uid_mode":"userns"}`:                                                           503,
		`{"workspace":{"path":"` + first + `"},"binds":[{"source":"/etc"}]}`:                                                   400,
		`{"workspace":{"path":"` + first + `","mode":"ro"},"overlays":[{"path":"` + second + `","mode":"ro","persist":true}]}`: 400,
	} {
		status, body := f.call("POST", "/v1/isolated/session", request)
		equal(t, fmt.Sprint(request, expected), fmt.Sprint(request, status))
		equal(t, true, strings.Contains(body, `"code"`))
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(first, link); err != nil {
		t.Fatal(err)
	}
	status, _ := f.call("POST", "/v1/isolated/session", `{"workspace":{"path":"`+link+`"}}`)
	equal(t, 400, status)
}

func TestIsolatedRunsInTheBackgroundTimeOutAndOutliveNothing(t *testing.T) {
	f := newFixture(t)
	ws := workspace(t)
	path, id := f.isolate(object{"workspace": object{"path": ws}, "idle_timeout_seconds": 600})
	status, body := f.call("POST", path+"/run", `{"code":"echo one; sleep 0.2; echo two; exit 3","background":true}`)
	var started isolatedRunStatus
	if err := json.Unmarshal([]byte(body), &started); status != 202 || err != nil || started.SessionID != id {
		t.Fatal(status, body)
	}
	eventually(t, "in time", func() bool {
		_, body := f.call("GET", path+"/runs/"+started.RunID, "")
		return strings.Contains(body, `"running":false`) && strings.Contains(body, `"exit_code":3`)
	})
	response := f.do("GET", path+"/runs/"+started.RunID+"/logs?cursor=4", nil)
	equal(t, "8", response.Header.Get(isolatedTail+"CURSOR"))
	status, _ = f.call("GET", path+"/runs/unknown", "")
	equal(t, 404, status)
	late := f.runAt(path+"/run", object{"code": `trap 'echo asked' INT; sleep 60 & wait`, "timeout_seconds": 1})
	equal(t, "IsolatedError -1", late.last.Error.Ename+" "+late.last.Error.Evalue)
	equal(t, []string{"alive"}, f.runAt(path+"/run", object{"code": "echo alive"}).stdout)
	status, body = f.call("POST", path+"/run", `{"code":"sleep 60","background":true}`)
	equal(t, 202, status)
	_ = json.Unmarshal([]byte(body), &started)
	f.server.isolation.byID[id].helper.process.SignalGroup(syscall.SIGKILL)
	<-f.server.isolation.byID[id].helper.process.Done
	_, body = f.call("GET", path+"/runs/"+started.RunID, "")
	equal(t, true, strings.Contains(body, `"running":false`) && strings.Contains(body, "session terminated"))
	equal(t, "session process has exited", f.runAt(path+"/run", object{"code": "echo"}).last.Error.Evalue)
	_, body = f.call("GET", path, "")
	equal(t, true, strings.Contains(body, `"status":"dead"`))
}

func TestAnIsolatedRunsVariablesComeFirstWithoutBashToo(t *testing.T) {
	f := newFixture(t)
	ws := workspace(t)
	f.server.commands.env.Bind(map[string]string{"PATH": withoutBash(t, ws)})
	path, _ := f.isolate(object{"workspace": object{"path": ws}})
	f.runAt(path+"/run", object{"code": "export X=session"})
	run := f.runAt(path+"/run", object{"code": `echo "$X"`, "envs": object{"X": "run's"}})
	equal(t, []string{"run's"}, run.stdout)
}

func TestAnIdleIsolatedSessionEndsAndNotBeforeItsJob(t *testing.T) {
	f := newFixture(t)
	ws := workspace(t)
	path, _ := f.isolate(object{"workspace": object{"path": ws, "mode": "rw"}, "idle_timeout_seconds": 1})
	f.background(path, "sleep 1.6; echo over >job")
	eventually(t, "in time", func() bool { status, _ := f.call("GET", path, ""); return status == 404 })
	equal(t, "over\n", mustRead(t, ws+"/job"))
}

func TestADeadIsolatedSessionIsRemovedWhenItsTimeIsOver(t *testing.T) {
	f := newFixture(t)
	path, id := f.isolate(object{"workspace": object{"path": workspace(t)}, "idle_timeout_seconds": 1})
	f.server.isolation.byID[id].helper.process.SignalGroup(syscall.SIGKILL)
	eventually(t, "in time", func() bool { status, _ := f.call("GET", path, ""); return status == 404 })
}

func TestARunThatBeginsAtTheEndOfTheIdleTimeIsKept(t *testing.T) {
	f := newFixture(t)
	path, id := f.isolate(object{"workspace": object{"path": workspace(t)}, "idle_timeout_seconds": 600})
	watched := f.overdue(id) // its clock runs out
	_, err := f.server.isolation.use(id, true)
	equal(t, nil, err)
	f.server.isolation.expire(watched)
	status, _ := f.call("GET", path, "")
	equal(t, 200, status)
	f.server.isolation.release(watched, true)
	f.server.isolation.expire(f.overdue(id))
	status, _ = f.call("GET", path, "")
	equal(t, 404, status)
}

func TestAFailureToIsolateIsNotRemembered(t *testing.T) {
	f := newFixture(t)
	root := isolationRoot(t) + "/sessions"
	equal(t, nil, os.WriteFile(root, nil, 0o644))
	f.server.isolation = NewIsolation(f.server.commands.Launcher, testProgram(t), root, false)
	available := func() bool {
		_, body := f.call("GET", "/v1/isolated/capabilities", "")
		return strings.Contains(body, `"available":true`)
	}
	equal(t, false, available())
	equal(t, nil, os.Remove(root))
	equal(t, false, available()) // it is not tried again at once
	f.server.isolation.retry = 0
	equal(t, true, available())
	equal(t, nil, os.RemoveAll(root))
	equal(t, nil, os.WriteFile(root, nil, 0o644))
	equal(t, true, available()) // that it works is remembered
	equal(t, nil, os.Remove(root))
}

func TestWhatIsWritableBesidesLiesWhereBindsMay(t *testing.T) {
	for _, place := range []string{"/etc", "/root", "/usr/bin", "/var/lib", "/tmp", "/home", "/mntx", "/workspace/../etc", "/"} {
		request := isolatedRequest{Workspace: &isolatedOverlay{Path: "/var/tmp"}, Writable: []string{place}}
		_, err := request.plan("/nowhere")
		if err == nil || err.(*problem).status != 400 {
			t.Errorf("%s: %v", place, err)
		}
	}
	allowed, err := os.MkdirTemp("/mnt", "execd-writable-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(allowed)
	link := allowed + "/link"
	equal(t, nil, os.Symlink("/etc", link))
	for path, accepted := range map[string]bool{allowed: true, link: false, link + "/ssl": false} {
		request := isolatedRequest{Workspace: &isolatedOverlay{Path: "/var/tmp"}, Writable: []string{path}}
		_, err := request.plan("/nowhere")
		equal(t, fmt.Sprint(path, accepted), fmt.Sprint(path, err == nil))
	}
}

func TestAClientThatLeavesInterruptsItsIsolatedRun(t *testing.T) {
	f := newFixture(t)
	ws := workspace(t)
	path, _ := f.isolate(object{"workspace": object{"path": ws, "mode": "rw"}})
	code := `trap 'echo INT >>asked; exit' INT; trap 'echo TERM >>asked; exit' TERM; touch begun; while :; do sleep 0.02; done`
	body, _ := json.Marshal(object{"code": code})
	ctx, leave := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, "POST", f.http.URL+path+"/run", bytes.NewReader(body))
	equal(t, nil, err)
	request.Header.Set(tokenHeader, testToken)
	response, err := http.DefaultClient.Do(request)
	equal(t, nil, err)
	defer response.Body.Close()
	eventually(t, "begun", func() bool { _, err := os.Stat(ws + "/begun"); return err == nil })
	leave()
	eventually(t, "asked", func() bool { text, _ := os.ReadFile(ws + "/asked"); return len(text) > 0 })
	equal(t, "INT\n", mustRead(t, ws+"/asked"))
	equal(t, []string{"alive"}, f.runAt(path+"/run", object{"code": "echo alive"}).stdout)
}

func TestWithoutTheCapabilityNothingIsPretended(t *testing.T) {
	f := newFixture(t)
	plain := *f.server.commands.Launcher
	plain.reaper = &Reaper{children: map[int]*Process{}}
	f.server.isolation = NewIsolation(&plain, testProgram(t), isolationRoot(t), false)
	status, body := f.call("GET", "/v1/isolated/capabilities", "")
	equal(t, true, status == 200 && strings.Contains(body, `"available":false`) && strings.Contains(body, "bootstrap.execd.isolation") && strings.Contains(body, "runsc") && !strings.Contains(body, "CAP_"))
	for _, route := range []string{"POST /session", "GET /sessions", "GET /session/x", "POST /session/x/run", "GET /session/x/files/info"} {
		method, path, _ := strings.Cut(route, " ")
		status, body = f.call(method, "/v1/isolated"+path, "{}")
		equal(t, true, status == 503 && strings.Contains(body, codeUnavailable))
	}
	status, body = f.call("GET", "/v1/isolated/session/x/diff", "")
	equal(t, true, status == 503 && strings.Contains(body, "NOT_SUPPORTED"))
	status, _ = f.call("GET", "/v1/isolated/session/x/command", "")
	equal(t, 404, status)
}

func TestAnIsolatedSessionHasDevicesOfItsOwn(t *testing.T) {
	f := newFixture(t)
	outside := []string{"/dev/execd-isolated-test", "/dev/shm/execd-isolated-test"}
	t.Cleanup(func() {
		for _, name := range outside {
			os.Remove(name)
		}
	})
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0) // one outside, whatever else there is
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	path, _ := f.isolate(object{"workspace": object{"path": workspace(t)}})
	run := f.runAt(path+"/run", object{"code": "touch " + strings.Join(outside, " ") + ` && echo made; echo x >/dev/null && head -c 3 /dev/zero | wc -c
ls /dev/pts/[0-9]* 2>/dev/null | wc -l`})
	equal(t, []string{"made", "3", "0"}, run.stdout)
	for _, name := range outside {
		if _, err := os.Lstat(name); err == nil {
			t.Fatal(name + " can be seen outside")
		}
	}
}

func TestAMountThatWasExchangedAfterItWasCheckedIsNotMade(t *testing.T) {
	f := newFixture(t)
	secret := workspace(t)
	equal(t, "", f.server.isolation.unavailable())
	for name, exchange := range map[string]func(path string) error{
		"link":  func(path string) error { return os.Symlink(secret, path) },
		"above": func(path string) error { return os.Symlink(secret, filepath.Dir(path)) },
		"gone":  func(string) error { return nil },
	} {
		for _, mode := range []string{"rw", "ro", "overlay"} {
			shared := workspace(t) + "/above/share"
			if err := os.MkdirAll(shared, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(secret+"/share", 0o755); err != nil {
				t.Fatal(err)
			}
			request := &isolatedRequest{Workspace: &isolatedOverlay{Path: shared, Mode: &mode}}
			plan, err := request.plan(f.server.isolation.root)
			if err == nil {
				err = request.identity(plan, f.server.commands.Launcher)
			}
			if err != nil {
				t.Fatal(err)
			}
			if name == "above" {
				os.Remove(shared)
				err = os.Remove(filepath.Dir(shared))
			} else {
				err = os.Remove(shared)
			}
			if err == nil {
				err = exchange(shared)
			}
			if err != nil {
				t.Fatal(err)
			}
			if made, err := f.server.isolation.make(request, plan); err == nil {
				f.server.isolation.remove(made.id)
				t.Error(name + ", " + mode + ": a session was made")
			}
			if _, err := os.Lstat(shared); name == "gone" && err == nil {
				t.Error(mode + ": what was gone was made")
			}
		}
	}
	left, _ := os.ReadDir(f.server.isolation.root)
	equal(t, 0, len(left))
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

type isolatedFixture struct {
	*client
	launcher  *Launcher
	isolation *Isolation
}

func newIsolatedFixture(t *testing.T) *isolatedFixture {
	t.Helper()
	launcher, _ := testLauncher(t)
	f := &isolatedFixture{launcher: launcher, isolation: NewIsolation(launcher, isInfo, testProgram(t), outsideTmp(t), false)}
	f.client = newClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, _ := strings.CutPrefix(r.URL.Path, "/v1/isolated")
		handler := f.isolation.route(r.Method, path)
		if handler == nil {
			notFound(w)
			return
		}
		handler(w, r)
	}))
	return f
}

// isInfo stands for all routes of files.
func isInfo(_, path string) bool { return strings.HasPrefix(path, "/files/") }

func TestIsolatedSessionWritesToItsOwnLayerOnly(t *testing.T) {
	f := newIsolatedFixture(t)
	ws := workspace(t)
	path, id := f.isolate(object{"workspace": object{"path": ws}})
	run := f.runAt(path+"/run", object{"code": `pwd; cat file; echo; echo above >file; echo new >made; n=1; ps() { echo $$; }
touch /etc/execd-test 2>/dev/null || echo read-only; echo hidden >/tmp/execd-isolated; ls ` + f.isolation.root + ` | wc -l
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
	left, _ := os.ReadDir(f.isolation.root)
	equal(t, 0, len(left))
	equal(t, "below", mustRead(t, ws+"/file"))
}

func TestIsolatedSessionsMountWhatIsAskedForAndNothingElse(t *testing.T) {
	f := newIsolatedFixture(t)
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
	f := newIsolatedFixture(t)
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
	f.isolation.byID[id].helper.process.SignalGroup(syscall.SIGKILL)
	<-f.isolation.byID[id].helper.process.Done
	_, body = f.call("GET", path+"/runs/"+started.RunID, "")
	equal(t, true, strings.Contains(body, `"running":false`) && strings.Contains(body, "session terminated"))
	equal(t, "session process has exited", f.runAt(path+"/run", object{"code": "echo"}).last.Error.Evalue)
	_, body = f.call("GET", path, "")
	equal(t, true, strings.Contains(body, `"status":"dead"`))
}

func TestAnIsolatedRunsVariablesComeFirstWithoutBashToo(t *testing.T) {
	f := newIsolatedFixture(t)
	ws := workspace(t)
	f.launcher.env.Bind(map[string]string{"PATH": withoutBash(ws)})
	path, _ := f.isolate(object{"workspace": object{"path": ws}})
	f.runAt(path+"/run", object{"code": "export X=session"})
	run := f.runAt(path+"/run", object{"code": `echo "$X"`, "envs": object{"X": "run's"}})
	equal(t, []string{"run's"}, run.stdout)
}

func TestAnIdleIsolatedSessionEndsAndNotBeforeItsJob(t *testing.T) {
	f := newIsolatedFixture(t)
	ws := workspace(t)
	path, _ := f.isolate(object{"workspace": object{"path": ws, "mode": "rw"}, "idle_timeout_seconds": 1})
	f.background(path, "sleep 1.6; echo over >job")
	eventually(t, "in time", func() bool { status, _ := f.call("GET", path, ""); return status == 404 })
	equal(t, "over\n", mustRead(t, ws+"/job"))
}

func TestADeadIsolatedSessionIsRemovedWhenItsTimeIsOver(t *testing.T) {
	f := newIsolatedFixture(t)
	path, id := f.isolate(object{"workspace": object{"path": workspace(t)}, "idle_timeout_seconds": 1})
	f.isolation.byID[id].helper.process.SignalGroup(syscall.SIGKILL)
	eventually(t, "in time", func() bool { status, _ := f.call("GET", path, ""); return status == 404 })
}

func TestARunThatBeginsAtTheEndOfTheIdleTimeIsKept(t *testing.T) {
	f := newIsolatedFixture(t)
	path, id := f.isolate(object{"workspace": object{"path": workspace(t)}, "idle_timeout_seconds": 600})
	watched := f.overdue(id) // its clock runs out
	_, err := f.isolation.use(id, true)
	equal(t, nil, err)
	f.isolation.expire(watched)
	status, _ := f.call("GET", path, "")
	equal(t, 200, status)
	f.isolation.release(watched, true)
	f.isolation.expire(f.overdue(id))
	status, _ = f.call("GET", path, "")
	equal(t, 404, status)
}

func TestAFailureToIsolateIsNotRemembered(t *testing.T) {
	f := newIsolatedFixture(t)
	root := outsideTmp(t) + "/sessions"
	equal(t, nil, os.WriteFile(root, nil, 0o644))
	f.isolation = NewIsolation(f.launcher, isInfo, testProgram(t), root, false)
	available := func() bool {
		_, body := f.call("GET", "/v1/isolated/capabilities", "")
		return strings.Contains(body, `"available":true`)
	}
	equal(t, false, available())
	equal(t, nil, os.Remove(root))
	equal(t, false, available()) // it is not tried again at once
	f.isolation.retry = 0
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
	f := newIsolatedFixture(t)
	ws := workspace(t)
	path, _ := f.isolate(object{"workspace": object{"path": ws, "mode": "rw"}})
	code := `trap 'echo INT >>asked; exit' INT; trap 'echo TERM >>asked; exit' TERM; touch begun; while :; do sleep 0.02; done`
	body, _ := json.Marshal(object{"code": code})
	ctx, leave := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, "POST", f.url+path+"/run", bytes.NewReader(body))
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
	f := newIsolatedFixture(t)
	plain := *f.launcher
	plain.reaper = &Reaper{}
	f.isolation = NewIsolation(&plain, isInfo, testProgram(t), outsideTmp(t), false)
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
	f := newIsolatedFixture(t)
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
	f := newIsolatedFixture(t)
	secret := workspace(t)
	equal(t, "", f.isolation.unavailable())
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
			plan, err := request.plan(f.isolation.root)
			if err == nil {
				err = request.identity(plan, f.launcher)
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
			if made, err := f.isolation.make(request, plan); err == nil {
				f.isolation.remove(made.id)
				t.Error(name + ", " + mode + ": a session was made")
			}
			if _, err := os.Lstat(shared); name == "gone" && err == nil {
				t.Error(mode + ": what was gone was made")
			}
		}
	}
	left, _ := os.ReadDir(f.isolation.root)
	equal(t, 0, len(left))
}

func TestTimeLimitsOfIsolatedRunsNeverWrapAround(t *testing.T) {
	const day, most = 86_400, int64(math.MaxInt64 / int64(time.Second))
	for _, seconds := range []int64{0, day, day + 1, 400 * day, most, most + 1, math.MaxInt64, -1, math.MinInt64} {
		code := "true"
		run, err := (&isolatedRunRequest{Code: &code, Timeout: &seconds}).check()
		if refused := seconds < 0 || seconds > most; (err != nil) != refused {
			t.Error(seconds, err)
		}
		if err == nil && seconds > 0 && run.limit != time.Duration(seconds)*time.Second {
			t.Error(seconds, run.limit)
		}
	}
}

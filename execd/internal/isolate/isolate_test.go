package isolate

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

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

type fixture struct {
	*testkit.Client
	launcher  *process.Launcher
	isolation *Isolation
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	launcher, _ := testhost.Launcher(t)
	f := &fixture{launcher: launcher, isolation: New(launcher, isInfo, testhost.Program(t), testkit.OutsideTmp(t), false)}
	f.Client = testkit.NewClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, _ := strings.CutPrefix(r.URL.Path, "/v1/isolated")
		handler := f.isolation.Route(r.Method, path)
		if handler == nil {
			httpx.NotFound(w)
			return
		}
		handler(w, r)
	}))
	return f
}

// isInfo stands for all routes of files.
func isInfo(_, path string) bool { return strings.HasPrefix(path, "/files/") }

func TestIsolatedSessionWritesToItsOwnLayerOnly(t *testing.T) {
	f := newFixture(t)
	ws := testkit.Workspace(t)
	path, id := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": ws}})
	run := f.RunAt(path+"/run", testkit.Object{"code": `pwd; cat file; echo; echo above >file; echo new >made; n=1; ps() { echo $$; }
touch /etc/execd-test 2>/dev/null || echo read-only; echo hidden >/tmp/execd-isolated; ls ` + f.isolation.root + ` | wc -l
[ -z "$EXECD_ENVS" ] && echo without; kill -9 1; echo $PPID`, "envs": testkit.Object{"GIVEN": "v'1"}})
	testkit.Equal(t, []string{ws, "below", "read-only", "0", "without", "1"}, run.Stdout)
	testkit.Equal(t, "execution_complete", run.Last.Type)
	testkit.Equal(t, []string{"1 above gone"}, f.RunAt(path+"/run", testkit.Object{"code": `echo $n $(cat file) ${GIVEN-gone}`}).Stdout)
	testkit.Equal(t, "below", testkit.MustRead(t, ws+"/file"))
	for _, name := range []string{ws + "/made", "/tmp/execd-isolated"} {
		if _, err := os.Stat(name); err == nil {
			t.Fatal(name + " can be seen outside")
		}
	}
	status, body := f.Call("GET", path+"/files/download?path="+ws+"/file", "")
	testkit.Equal(t, "200 above\n", fmt.Sprint(status, " ", body))
	status, body = f.Call("POST", path+"/files/replace", `{"`+ws+`/file":{"old":"above","new":"again"}}`)
	testkit.Equal(t, `200 {"`+ws+`/file":{"replacedCount":1}}`, fmt.Sprint(status, " ", body))
	status, body = f.Call("GET", path, "")
	testkit.Equal(t, true, status == 200 && strings.Contains(body, `"status":"active"`) && strings.Contains(body, `"workspace":{"path":"`+ws+`","mode":"overlay"}`))
	status, body = f.Call("GET", "/v1/isolated/sessions", "")
	testkit.Equal(t, true, status == 200 && strings.Contains(body, id))
	status, _ = f.Call("DELETE", path, "")
	testkit.Equal(t, 200, status)
	status, body = f.Call("DELETE", path, "")
	testkit.Equal(t, true, status == 404 && strings.Contains(body, "SESSION_NOT_FOUND"))
	left, _ := os.ReadDir(f.isolation.root)
	testkit.Equal(t, 0, len(left))
	testkit.Equal(t, "below", testkit.MustRead(t, ws+"/file"))
}

func TestIsolatedSessionsMountWhatIsAskedForAndNothingElse(t *testing.T) {
	f := newFixture(t)
	first, second := testkit.Workspace(t), testkit.Workspace(t)
	if err := os.Mkdir(first+"/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	path, _ := f.Isolate(testkit.Object{
		"overlays": []testkit.Object{{"path": first, "mode": "rw"}, {"path": first + "/sub", "mode": "ro"}, {"path": second, "persist": false}},
		"uid":      1234, "gid": 1235, "share_net": false, "profile": "balanced",
		"env_passthrough": testkit.Object{"mode": "allow", "keys": []string{"PATH", "FIXTURE"}},
	})
	if err := os.Chmod(first, 0o777); err != nil {
		t.Fatal(err)
	}
	run := f.RunAt(path+"/run", testkit.Object{"code": `id -u; id -g; echo through >made; touch sub/x 2>/dev/null || echo sub read-only
env | cut -d= -f1 | grep -vE '^(_|PWD|SHLVL)$' | sort | tr '\n' ' '; echo; grep -c : /proc/net/dev; grep CapEff /proc/self/status
mount -t tmpfs x /mnt 2>/dev/null || echo no mounts`})
	testkit.Equal(t, []string{"1234", "1235", "sub read-only", "FIXTURE PATH ", "1", "CapEff:\t0000000000000000", "no mounts"}, run.Stdout)
	testkit.Equal(t, "through\n", testkit.MustRead(t, first+"/made"))
	for request, expected := range map[string]int{
		`{}`: 400, `{"workspace":{"path":"relative"}}`: 400, `{"workspace":{"path":"/var/../etc"}}`: 400,
		`{"workspace":{"path":"/proc"}}`: 400, `{"workspace":{"path":"/"}}`: 400, `{"workspace":{"path":"/nowhere"}}`: 400,
		`{"workspace":{"path":"` + first + `","mode":"rwx"}}`: 400, `{"workspace":{"path":"` + first + `"},"profile":"loose"}`: 400,
		`{"workspace":{"path":"` + first + `"},"overlays":[{"path":"` + first + `"}]}`:                                         400,
		`{"workspace":{"path":"` + first + `"},"uid_mode":"userns"}`:                                                           503,
		`{"workspace":{"path":"` + first + `"},"binds":[{"source":"/etc"}]}`:                                                   400,
		`{"workspace":{"path":"` + first + `","mode":"ro"},"overlays":[{"path":"` + second + `","mode":"ro","persist":true}]}`: 400,
	} {
		status, body := f.Call("POST", "/v1/isolated/session", request)
		testkit.Equal(t, fmt.Sprint(request, expected), fmt.Sprint(request, status))
		testkit.Equal(t, true, strings.Contains(body, `"code"`))
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(first, link); err != nil {
		t.Fatal(err)
	}
	status, _ := f.Call("POST", "/v1/isolated/session", `{"workspace":{"path":"`+link+`"}}`)
	testkit.Equal(t, 400, status)
}

func TestIsolatedRunsInTheBackgroundTimeOutAndOutliveNothing(t *testing.T) {
	f := newFixture(t)
	ws := testkit.Workspace(t)
	path, id := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": ws}, "idle_timeout_seconds": 600})
	status, body := f.Call("POST", path+"/run", `{"code":"echo one; sleep 0.2; echo two; exit 3","background":true}`)
	var started runStatus
	if err := json.Unmarshal([]byte(body), &started); status != 202 || err != nil || started.SessionID != id {
		t.Fatal(status, body)
	}
	testkit.Eventually(t, "in time", func() bool {
		_, body := f.Call("GET", path+"/runs/"+started.RunID, "")
		return strings.Contains(body, `"running":false`) && strings.Contains(body, `"exit_code":3`)
	})
	response := f.Do("GET", path+"/runs/"+started.RunID+"/logs?cursor=4", nil)
	testkit.Equal(t, "8", response.Header.Get(tailPrefix+"CURSOR"))
	status, _ = f.Call("GET", path+"/runs/unknown", "")
	testkit.Equal(t, 404, status)
	late := f.RunAt(path+"/run", testkit.Object{"code": `trap 'echo asked' INT; sleep 60 & wait`, "timeout_seconds": 1})
	testkit.Equal(t, "IsolatedError -1", late.Last.Error.Ename+" "+late.Last.Error.Evalue)
	testkit.Equal(t, []string{"alive"}, f.RunAt(path+"/run", testkit.Object{"code": "echo alive"}).Stdout)
	status, body = f.Call("POST", path+"/run", `{"code":"sleep 60","background":true}`)
	testkit.Equal(t, 202, status)
	_ = json.Unmarshal([]byte(body), &started)
	f.isolation.byID[id].helper.Process.SignalGroup(syscall.SIGKILL)
	<-f.isolation.byID[id].helper.Process.Done
	_, body = f.Call("GET", path+"/runs/"+started.RunID, "")
	testkit.Equal(t, true, strings.Contains(body, `"running":false`) && strings.Contains(body, "session terminated"))
	testkit.Equal(t, "session process has exited", f.RunAt(path+"/run", testkit.Object{"code": "echo"}).Last.Error.Evalue)
	_, body = f.Call("GET", path, "")
	testkit.Equal(t, true, strings.Contains(body, `"status":"dead"`))
}

func TestAnIsolatedRunsVariablesComeFirstWithoutBashToo(t *testing.T) {
	f := newFixture(t)
	ws := testkit.Workspace(t)
	f.launcher.Env.Bind(map[string]string{"PATH": testhost.WithoutBash(ws)})
	path, _ := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": ws}})
	f.RunAt(path+"/run", testkit.Object{"code": "export X=session"})
	run := f.RunAt(path+"/run", testkit.Object{"code": `echo "$X"`, "envs": testkit.Object{"X": "run's"}})
	testkit.Equal(t, []string{"run's"}, run.Stdout)
}

func TestAnIdleIsolatedSessionEndsAndNotBeforeItsJob(t *testing.T) {
	f := newFixture(t)
	ws := testkit.Workspace(t)
	path, _ := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": ws, "mode": "rw"}, "idle_timeout_seconds": 1})
	f.background(path, "sleep 1.6; echo over >job")
	testkit.Eventually(t, "in time", func() bool { status, _ := f.Call("GET", path, ""); return status == 404 })
	testkit.Equal(t, "over\n", testkit.MustRead(t, ws+"/job"))
}

func TestADeadIsolatedSessionIsRemovedWhenItsTimeIsOver(t *testing.T) {
	f := newFixture(t)
	path, id := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t)}, "idle_timeout_seconds": 1})
	f.isolation.byID[id].helper.Process.SignalGroup(syscall.SIGKILL)
	testkit.Eventually(t, "in time", func() bool { status, _ := f.Call("GET", path, ""); return status == 404 })
}

func TestARunThatBeginsAtTheEndOfTheIdleTimeIsKept(t *testing.T) {
	f := newFixture(t)
	path, id := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t)}, "idle_timeout_seconds": 600})
	watched := f.overdue(id) // its clock runs out
	_, err := f.isolation.use(id, true)
	testkit.Equal(t, nil, err)
	f.isolation.expire(watched)
	status, _ := f.Call("GET", path, "")
	testkit.Equal(t, 200, status)
	f.isolation.release(watched, true)
	f.isolation.expire(f.overdue(id))
	status, _ = f.Call("GET", path, "")
	testkit.Equal(t, 404, status)
}

func TestAFailureToIsolateIsNotRemembered(t *testing.T) {
	f := newFixture(t)
	root := testkit.OutsideTmp(t) + "/sessions"
	testkit.Equal(t, nil, os.WriteFile(root, nil, 0o644))
	f.isolation = New(f.launcher, isInfo, testhost.Program(t), root, false)
	available := func() bool {
		_, body := f.Call("GET", "/v1/isolated/capabilities", "")
		return strings.Contains(body, `"available":true`)
	}
	testkit.Equal(t, false, available())
	testkit.Equal(t, nil, os.Remove(root))
	testkit.Equal(t, false, available()) // it is not tried again at once
	f.isolation.retry = 0
	testkit.Equal(t, true, available())
	testkit.Equal(t, nil, os.RemoveAll(root))
	testkit.Equal(t, nil, os.WriteFile(root, nil, 0o644))
	testkit.Equal(t, true, available()) // that it works is remembered
	testkit.Equal(t, nil, os.Remove(root))
}

func TestWhatIsWritableBesidesLiesWhereBindsMay(t *testing.T) {
	for _, place := range []string{"/etc", "/root", "/usr/bin", "/var/lib", "/tmp", "/home", "/mntx", "/workspace/../etc", "/"} {
		request := request{Workspace: &overlay{Path: "/var/tmp"}, Writable: []string{place}}
		_, err := request.plan("/nowhere")
		if err == nil || err.(*httpx.Problem).Status != 400 {
			t.Errorf("%s: %v", place, err)
		}
	}
	allowed, err := os.MkdirTemp("/mnt", "execd-writable-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(allowed)
	link := allowed + "/link"
	testkit.Equal(t, nil, os.Symlink("/etc", link))
	for path, accepted := range map[string]bool{allowed: true, link: false, link + "/ssl": false} {
		request := request{Workspace: &overlay{Path: "/var/tmp"}, Writable: []string{path}}
		_, err := request.plan("/nowhere")
		testkit.Equal(t, fmt.Sprint(path, accepted), fmt.Sprint(path, err == nil))
	}
}

func TestAClientThatLeavesInterruptsItsIsolatedRun(t *testing.T) {
	f := newFixture(t)
	ws := testkit.Workspace(t)
	path, _ := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": ws, "mode": "rw"}})
	code := `trap 'echo INT >>asked; exit' INT; trap 'echo TERM >>asked; exit' TERM; touch begun; while :; do sleep 0.02; done`
	body, _ := json.Marshal(testkit.Object{"code": code})
	ctx, leave := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, "POST", f.URL+path+"/run", bytes.NewReader(body))
	testkit.Equal(t, nil, err)
	request.Header.Set(httpx.TokenHeader, testkit.Token)
	response, err := http.DefaultClient.Do(request)
	testkit.Equal(t, nil, err)
	defer response.Body.Close()
	testkit.Eventually(t, "begun", func() bool { _, err := os.Stat(ws + "/begun"); return err == nil })
	leave()
	testkit.Eventually(t, "asked", func() bool { text, _ := os.ReadFile(ws + "/asked"); return len(text) > 0 })
	testkit.Equal(t, "INT\n", testkit.MustRead(t, ws+"/asked"))
	testkit.Equal(t, []string{"alive"}, f.RunAt(path+"/run", testkit.Object{"code": "echo alive"}).Stdout)
}

func TestWithoutTheCapabilityNothingIsPretended(t *testing.T) {
	f := newFixture(t)
	plain := *f.launcher
	plain.Reaper = &process.Reaper{}
	f.isolation = New(&plain, isInfo, testhost.Program(t), testkit.OutsideTmp(t), false)
	status, body := f.Call("GET", "/v1/isolated/capabilities", "")
	testkit.Equal(t, true, status == 200 && strings.Contains(body, `"available":false`) && strings.Contains(body, "bootstrap.execd.isolation") && strings.Contains(body, "runsc") && !strings.Contains(body, "CAP_"))
	for _, route := range []string{"POST /session", "GET /sessions", "GET /session/x", "POST /session/x/run", "GET /session/x/files/info"} {
		method, path, _ := strings.Cut(route, " ")
		status, body = f.Call(method, "/v1/isolated"+path, "{}")
		testkit.Equal(t, true, status == 503 && strings.Contains(body, httpx.CodeUnavailable))
	}
	status, body = f.Call("GET", "/v1/isolated/session/x/diff", "")
	testkit.Equal(t, true, status == 503 && strings.Contains(body, "NOT_SUPPORTED"))
	status, _ = f.Call("GET", "/v1/isolated/session/x/command", "")
	testkit.Equal(t, 404, status)
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
	path, _ := f.Isolate(testkit.Object{"workspace": testkit.Object{"path": testkit.Workspace(t)}})
	run := f.RunAt(path+"/run", testkit.Object{"code": "touch " + strings.Join(outside, " ") + ` && echo made; echo x >/dev/null && head -c 3 /dev/zero | wc -c
ls /dev/pts/[0-9]* 2>/dev/null | wc -l`})
	testkit.Equal(t, []string{"made", "3", "0"}, run.Stdout)
	for _, name := range outside {
		if _, err := os.Lstat(name); err == nil {
			t.Fatal(name + " can be seen outside")
		}
	}
}

func TestAMountThatWasExchangedAfterItWasCheckedIsNotMade(t *testing.T) {
	f := newFixture(t)
	secret := testkit.Workspace(t)
	testkit.Equal(t, "", f.isolation.unavailable())
	for name, exchange := range map[string]func(path string) error{
		"link":  func(path string) error { return os.Symlink(secret, path) },
		"above": func(path string) error { return os.Symlink(secret, filepath.Dir(path)) },
		"gone":  func(string) error { return nil },
	} {
		for _, mode := range []string{"rw", "ro", "overlay"} {
			shared := testkit.Workspace(t) + "/above/share"
			if err := os.MkdirAll(shared, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(secret+"/share", 0o755); err != nil {
				t.Fatal(err)
			}
			request := &request{Workspace: &overlay{Path: shared, Mode: &mode}}
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
			if made, err := f.isolation.begin(request, plan); err == nil {
				f.isolation.remove(made.id)
				t.Error(name + ", " + mode + ": a session was made")
			}
			if _, err := os.Lstat(shared); name == "gone" && err == nil {
				t.Error(mode + ": what was gone was made")
			}
		}
	}
	left, _ := os.ReadDir(f.isolation.root)
	testkit.Equal(t, 0, len(left))
}

func TestTimeLimitsOfIsolatedRunsNeverWrapAround(t *testing.T) {
	const day, most = 86_400, int64(math.MaxInt64 / int64(time.Second))
	for _, seconds := range []int64{0, day, day + 1, 400 * day, most, most + 1, math.MaxInt64, -1, math.MinInt64} {
		code := "true"
		run, err := (&runRequest{Code: &code, Timeout: &seconds}).check()
		if refused := seconds < 0 || seconds > most; (err != nil) != refused {
			t.Error(seconds, err)
		}
		if err == nil && seconds > 0 && run.Limit != time.Duration(seconds)*time.Second {
			t.Error(seconds, run.Limit)
		}
	}
}

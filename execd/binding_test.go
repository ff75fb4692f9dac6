package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestInitIsThereOnlyWhenAskedForAndBindsTokenAndVariables(t *testing.T) {
	f := newFixture(t)
	status, _ := f.call("POST", "/internal/init", "{}")
	equal(t, 404, status)
	status, _ = f.call("GET", "/ready", "", tokenHeader, "")
	equal(t, 503, status)
	f.server.binding.setReady(true)
	status, body := f.call("GET", "/ready", "", tokenHeader, "")
	equal(t, `200 {"generation":0,"ready":true}`, fmt.Sprint(status, " ", body))

	f.server.binding, _ = NewBinding(Auth{}, true, "")
	status, _ = f.call("GET", "/ping", "")
	equal(t, 200, status)
	for _, route := range []string{"GET /metrics", "GET /ready", "GET /proxy/80/"} {
		method, path, _ := strings.Cut(route, " ")
		status, _ = f.call(method, path, "")
		equal(t, 503, status)
	}
	good := `{"sandboxId":"new","generation":%d,"accessTokenHash":"sha256:` + hashToken("fresh") + `","envs":{"BOUND":"b"}}`
	for _, bad := range []string{
		`{}`, `{"sandboxId":"x","accessTokenHash":"` + hashToken("fresh") + `"}`, strings.Replace(good, "BOUND", "EXECD_ACCESS_TOKEN", 1),
		strings.Replace(good, `"envs"`, `"entrypointPolicy":"perhaps","envs"`, 1),
		strings.Replace(good, `"envs"`, `"lifecycle":{"preStart":{"command":[]}},"envs"`, 1),
	} {
		status, body = f.call("POST", "/internal/init", strings.Replace(bad, "%d", "1", 1))
		equal(t, "400 "+body, fmt.Sprint(status, " ", body))
	}
	status, body = f.call("POST", "/internal/init", fmt.Sprintf(good, 5))
	equal(t, `200 {"generation":5,"sandboxId":"new"}`, fmt.Sprint(status, " ", body))
	status, _ = f.call("GET", "/metrics", "") // the former token
	equal(t, 401, status)
	status, _ = f.call("POST", "/internal/init", fmt.Sprintf(good, 6)) // without the new one
	equal(t, 401, status)
	status, _ = f.call("POST", "/internal/init", fmt.Sprintf(good, 4), tokenHeader, "fresh")
	equal(t, 409, status)
	status, body = f.call("POST", "/command", `{"command":"echo $BOUND $OPENSANDBOX_ID $FIXTURE"}`, tokenHeader, "fresh")
	equal(t, true, status == 200 && strings.Contains(body, `"b new daemon\n"`))
	_, body = f.call("POST", "/session", "{}", tokenHeader, "fresh")
	status, _ = f.call("POST", "/internal/init", strings.Replace(fmt.Sprintf(good, 6), "BOUND", "OTHER", 1), tokenHeader, "fresh")
	equal(t, 200, status)
	id := body[len(`{"session_id":"`) : len(body)-2]
	status, _ = f.call("DELETE", "/session/"+id, "", tokenHeader, "fresh") // ended by the init
	equal(t, 404, status)
	_, body = f.call("POST", "/command", `{"command":"echo ${BOUND-gone} $OTHER"}`, tokenHeader, "fresh")
	equal(t, true, strings.Contains(body, `"gone b\n"`))
}

func TestStartScriptAndHooksComeBeforeTheEntrypoint(t *testing.T) {
	directory := t.TempDir()
	script := filepath.Join(directory, "pre.sh")
	if err := os.WriteFile(script, []byte("export FROM_SCRIPT='a b'\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(directory, "log")
	hooks := `{"preStart":{"command":["sh","-c","sleep 0.2; echo pre $FROM_SCRIPT >>` + log + `"]},
"periodic":[{"name":"tick","schedule":"@every 1s","command":["sh","-c","echo tick >>` + log + `"],"timeoutSeconds":2}]}`
	process, url, _ := daemon(t, []string{
		"EXECD_BOOTSTRAP_PRE_SCRIPT=" + script, "OPENSANDBOX_LIFECYCLE=" + hooks,
		"BOOTSTRAP_CMD=echo main $FROM_SCRIPT ${OPENSANDBOX_LIFECYCLE-none} >>" + log + "; sleep 1.4; exit 9",
	}, "--access-token-sha256", hashToken(testToken), "--init", "--", "false")
	eventually(t, "in time", func() bool {
		response, err := http.Get(url + "/ready")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == 200
	})
	equal(t, 9, exitOf(t, process))
	lines := strings.Split(mustRead(t, log), "\n")
	equal(t, []string{"pre a b", "main a b none", "tick"}, lines[:3])

	process, _, stderr := daemon(t, []string{`OPENSANDBOX_LIFECYCLE={"preStart":{"command":["sh","-c","exit 4"]}}`},
		"--access-token-sha256", hashToken(testToken), "--init", "--", "touch", directory+"/never")
	equal(t, 1, exitOf(t, process))
	equal(t, true, strings.Contains(stderr(), "preStart: exit status 4"))
	process, _, _ = daemon(t, []string{`OPENSANDBOX_LIFECYCLE={"preStart":{"command":["sleep","60"],"timeoutSeconds":1}}`},
		"--access-token-sha256", hashToken(testToken), "--init", "--", "touch", directory+"/never")
	equal(t, 1, exitOf(t, process))
	process, _, _ = daemon(t, []string{`OPENSANDBOX_LIFECYCLE={"preStart":[]}`},
		"--access-token-sha256", hashToken(testToken), "--init", "--", "touch", directory+"/never")
	equal(t, 2, exitOf(t, process))
	_, err := os.Stat(directory + "/never")
	equal(t, true, os.IsNotExist(err))
}

func TestASignalEndsWhatComesBeforeTheEntrypoint(t *testing.T) {
	directory := t.TempDir()
	if err := os.WriteFile(directory+"/pre.sh", []byte("echo began $$.; sleep 60\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	script := "EXECD_BOOTSTRAP_PRE_SCRIPT=" + directory + "/pre.sh"
	hook := `OPENSANDBOX_LIFECYCLE={"preStart":{"command":["sh","-c","echo began $$.; sleep 60"]}}`
	entrypoint := []string{"--init", "--", "touch", directory + "/never"}
	for _, c := range []struct {
		before    string
		arguments []string
		status    int
	}{{script, entrypoint, 128 + 15}, {hook, entrypoint, 128 + 15}, {script, nil, 0}, {hook, nil, 0}} {
		process, _, stderr := daemon(t, []string{c.before}, append(hashArguments, c.arguments...)...)
		eventually(t, "began", func() bool { return strings.Contains(stderr(), ".\n") })
		_, text, _ := strings.Cut(stderr(), "began ")
		text, _, _ = strings.Cut(text, ".\n")
		group, err := strconv.Atoi(text)
		equal(t, true, err == nil && syscall.Kill(-group, 0) == nil)
		syscall.Kill(process.Pid, syscall.SIGTERM)
		equal(t, c.status, exitOf(t, process))
		eventually(t, "what it ran is gone", func() bool { return syscall.Kill(-group, 0) != nil })
	}
	_, err := os.Stat(directory + "/never")
	equal(t, true, os.IsNotExist(err))
}

func TestAnInitStartsTheEntrypointAgain(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	process, url, _ := daemon(t, nil, "--runtime-init", "--init", "--", "sh", "-c", "echo $OPENSANDBOX_ID. >>"+log+"; sleep 60")
	eventually(t, "in time", func() bool { data, _ := os.ReadFile(log); return string(data) == ".\n" })
	response, err := http.Post(url+"/internal/init", "", strings.NewReader(
		`{"sandboxId":"me","generation":1,"accessTokenHash":"sha256:`+hashToken("x")+`","entrypointPolicy":"restart"}`))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	equal(t, 200, response.StatusCode)
	eventually(t, "in time", func() bool { return mustRead(t, log) == ".\nme.\n" })
	process.SignalGroup(15)
	equal(t, 143, exitOf(t, process))
}

func TestAnInitDoesNotUndoTheEnd(t *testing.T) {
	directory := t.TempDir()
	process, url, stderr := daemon(t, nil, "--runtime-init", "--init", "--", "sh", "-c",
		`trap 'echo term; while [ ! -e `+directory+`/go ]; do sleep 0.02; done; exit 5' TERM; echo up; while :; do sleep 0.02; done`)
	eventually(t, "up", func() bool { return strings.Contains(stderr(), "up\n") && answers(url)() })
	syscall.Kill(process.Pid, syscall.SIGTERM)
	eventually(t, "term", func() bool { return strings.Contains(stderr(), "term\n") })
	response, err := http.Post(url+"/internal/init", "", strings.NewReader(
		`{"sandboxId":"me","generation":1,"accessTokenHash":"sha256:`+hashToken("x")+`","entrypointPolicy":"restart","preserveRuntimeState":true}`))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	equal(t, 200, response.StatusCode)
	equal(t, nil, os.WriteFile(directory+"/go", nil, 0o600))
	equal(t, 5, exitOf(t, process))
	equal(t, 1, strings.Count(stderr(), "up\n"))
}

// Nobody waits for another's preStart: neither who may not ask, nor who may.
func TestInitsDoNotQueue(t *testing.T) {
	process, url, _ := daemon(t, nil, "--runtime-init")
	post := func(token, hook string) int {
		request, err := http.NewRequest(http.MethodPost, url+"/internal/init", strings.NewReader(
			`{"sandboxId":"me","generation":1,"accessTokenHash":"sha256:`+hashToken("x")+`","lifecycle":`+hook+`}`))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("X-EXECD-ACCESS-TOKEN", token)
		response, err := (&http.Client{Timeout: 3 * time.Second}).Do(request)
		if err != nil {
			return 0
		}
		response.Body.Close()
		return response.StatusCode
	}
	eventually(t, "it listens", func() bool {
		response, err := http.Get(url + "/ping")
		if err == nil {
			response.Body.Close()
		}
		return err == nil
	})
	began, first := filepath.Join(t.TempDir(), "began"), make(chan int, 1)
	go func() { first <- post("", `{"preStart":{"command":["sh","-c","touch `+began+`; sleep 60"]}}`) }()
	eventually(t, "the first is under way", func() bool { _, err := os.Stat(began); return err == nil })
	equal(t, 401, post("", "null"))
	equal(t, 409, post("x", "null"))
	equal(t, 0, <-first)
	process.SignalGroup(9)
	exitOf(t, process)
}

// Another content of the launch file is what a restored daemon finds.
func TestAnotherLaunchUnbindsEverything(t *testing.T) {
	directory := t.TempDir()
	launch, ticks := filepath.Join(directory, "launch"), filepath.Join(directory, "ticks")
	write := func(path, text string) {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put := func(text string) { write(launch, text) }
	put(hashToken("first") + "\n")
	write(ticks, "")
	hooks := `{"periodic":[{"name":"tick","schedule":"@every 1s","command":["sh","-c","echo >>` + ticks + `"]}]}`
	process, url, stderr := daemon(t, []string{"OPENSANDBOX_LIFECYCLE=" + hooks},
		"--access-token-sha256", hashToken("old"), "--launch-file", launch)
	client := &http.Client{}
	call := func(client *http.Client, method, path, token, body string) int {
		request, err := http.NewRequest(method, url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set(tokenHeader, token)
		response, err := client.Do(request)
		if err != nil {
			return 0
		}
		defer response.Body.Close()
		_, _ = io.Copy(io.Discard, response.Body)
		return response.StatusCode
	}
	body := func(generation int, token string) string {
		return fmt.Sprintf(`{"sandboxId":"s","generation":%d,"accessTokenHash":"sha256:%s","preserveRuntimeState":true}`,
			generation, hashToken(token))
	}
	eventually(t, "it serves", func() bool { return call(client, "GET", "/metrics", "old", "") == 200 })
	equal(t, 404, call(client, "POST", "/internal/init", "old", body(9, "x"))) // it was not restored
	watching := make(chan int, 1)
	go func() { watching <- call(&http.Client{}, "GET", "/metrics/watch", "old", "") }()

	for _, unreadable := range []string{"", hashToken("second"), strings.Repeat("x", 64) + "\n"} {
		put(unreadable)
		equal(t, 503, call(client, "GET", "/metrics", "old", ""))
	}
	put(hashToken("first") + "\n")
	equal(t, 200, call(client, "GET", "/metrics", "old", ""))

	for generation, name := range []string{"second", "third"} { // and back to generation 0
		put(hashToken(name) + "\n")
		fresh := &http.Client{Transport: &http.Transport{}}
		equal(t, 503, call(fresh, "GET", "/metrics", "old", ""))
		equal(t, 503, call(fresh, "GET", "/ready", "old", ""))
		equal(t, 200, call(fresh, "GET", "/ping", "", ""))
		for _, other := range []string{"", "old", "first", "new"} {
			equal(t, 401, call(fresh, "POST", "/internal/init", other, body(1, "new")))
		}
		equal(t, 200, call(fresh, "POST", "/internal/init", name, body(1-generation, "new")))
		equal(t, 200, call(fresh, "GET", "/ready", "", ""))
		equal(t, 200, call(fresh, "GET", "/metrics", "new", ""))
		for _, other := range []string{"", "old", name} {
			equal(t, 401, call(fresh, "GET", "/metrics", other, ""))
			equal(t, 401, call(fresh, "POST", "/internal/init", other, body(2, "x")))
		}
	}
	select {
	case <-watching: // its connection was closed
	case <-time.After(5 * time.Second):
		t.Fatal("a stream from before goes on")
	}
	size := len(mustRead(t, ticks))
	eventually(t, "the hooks run on", func() bool { return len(mustRead(t, ticks)) > size+1 })
	equal(t, 2, strings.Count(stderr(), "restored from a checkpoint"))
	process.SignalGroup(9)
	exitOf(t, process)

	process, _, _ = daemon(t, nil, "--insecure-no-token", "--launch-file", directory+"/none")
	equal(t, 2, exitOf(t, process))
}

func TestSchedules(t *testing.T) {
	at := time.Date(2026, 2, 27, 23, 59, 30, 0, time.UTC)
	for text, expected := range map[string]string{
		"@every 90s": "2026-02-28T00:01:00Z", "* * * * *": "2026-02-28T00:00:00Z", "@hourly": "2026-02-28T00:00:00Z",
		"*/15 3 * * *": "2026-02-28T03:00:00Z", "5,7-9 * * * *": "2026-02-28T00:05:00Z", "0 0 29 2 *": "2028-02-29T00:00:00Z",
		"0 12 1 * 1": "2026-03-01T12:00:00Z", "0 12 * * 7": "2026-03-01T12:00:00Z", "0 0 31 2 *": "0001-01-01T00:00:00Z",
	} {
		next, err := parseSchedule(text)
		if err != nil {
			t.Fatal(text, err)
		}
		equal(t, text+" "+expected, text+" "+next(at).Format(time.RFC3339))
	}
	for _, text := range []string{"", "@every", "@every 1ms", "@every -5s", "* * * *", "60 * * * *", "*/0 * * * *", "5-3 * * * *", "a * * * *", ", * * * *", "+1 * * * *"} {
		if _, err := parseSchedule(text); err == nil {
			t.Fatal("accepted: " + text)
		}
	}
}

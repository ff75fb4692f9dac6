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

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/server"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

func TestStartWithoutATokenIsRefused(t *testing.T) {
	process, _, stderr := testhost.Daemon(t, nil)
	testkit.Equal(t, 2, testhost.ExitOf(t, process))
	testkit.Equal(t, true, strings.Contains(stderr(), "no access token"))
	process, _, _ = testhost.Daemon(t, nil, "--no-such-flag")
	testkit.Equal(t, 2, testhost.ExitOf(t, process))
}

func TestEntrypointStatusIsTheDaemonsStatus(t *testing.T) {
	for _, c := range []struct {
		entrypoint []string
		status     int
	}{
		{[]string{"sh", "-c", "exit 7"}, 7}, {[]string{"true"}, 0}, {[]string{"sh", "-c", "kill -KILL $$"}, 137},
		{[]string{"no-such-program"}, 127}, {[]string{"/no/such"}, 127}, {[]string{"/etc/passwd"}, 126},
	} {
		process, _, _ := testhost.Daemon(t, nil, append(append(testhost.HashArguments, "--init", "--"), c.entrypoint...)...)
		testkit.Equal(t, c.status, testhost.ExitOf(t, process))
	}
}

func TestSignalsReachTheEntrypointsGroup(t *testing.T) {
	process, url, stderr := testhost.Daemon(t, nil, append(testhost.HashArguments, "--init", "--", "sh", "-c",
		`trap 'echo usr1' USR1; trap 'echo term; exit 5' TERM; echo up; while :; do sleep 0.05; done`)...)
	testkit.Eventually(t, "up", func() bool { return strings.Contains(stderr(), "up\n") && testhost.Answers(url)() })
	syscall.Kill(process.Pid, syscall.SIGUSR1)
	testkit.Eventually(t, "usr1", func() bool { return strings.Contains(stderr(), "usr1\n") })
	syscall.Kill(process.Pid, syscall.SIGTERM)
	testkit.Equal(t, 5, testhost.ExitOf(t, process))
}

func TestAnEntrypointThatIgnoresTermIsKilledAfterTheGrace(t *testing.T) {
	process, _, stderr := testhost.Daemon(t, nil, append(testhost.HashArguments, "--stop-grace", "300ms", "--init", "--", "sh", "-c",
		`trap '' TERM; echo up; while :; do sleep 60; done`)...)
	testkit.Eventually(t, "up", func() bool { return strings.Contains(stderr(), "up\n") })
	syscall.Kill(process.Pid, syscall.SIGTERM)
	testkit.Equal(t, 137, testhost.ExitOf(t, process))
}

func TestTheIdleEntrypointNeedsNoTail(t *testing.T) {
	process, url, _ := testhost.Daemon(t, []string{"PATH=/nowhere"}, append(testhost.HashArguments, "--init", "--", "tail", "-f", "/dev/null")...)
	testkit.Eventually(t, "answer", testhost.Answers(url))
	syscall.Kill(process.Pid, syscall.SIGTERM)
	testkit.Equal(t, 143, testhost.ExitOf(t, process))
}

func TestAClearTokenLeavesNoTraceAndWorks(t *testing.T) {
	process, url, stderr := testhost.Daemon(t, []string{"EXECD_ACCESS_TOKEN=" + testkit.Token}, "--init", "--", "sleep", "60")
	testkit.Eventually(t, "answer", testhost.Answers(url))
	for _, name := range []string{"cmdline", "environ"} {
		data, err := os.ReadFile("/proc/" + strconv.Itoa(process.Pid) + "/" + name)
		if err != nil {
			t.Skip("not readable: ", err)
		}
		testkit.Equal(t, false, strings.Contains(string(data), testkit.Token))
	}
	request, _ := http.NewRequest("GET", url+"/metrics", nil)
	request.Header.Set(httpx.TokenHeader, testkit.Token)
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	testkit.Equal(t, 200, response.StatusCode)
	testkit.Equal(t, false, strings.Contains(stderr(), testkit.Token))
}

func TestOrphansAreReapedWhileCommandsKeepTheirStatuses(t *testing.T) {
	process, url, _ := testhost.Daemon(t, nil, append(testhost.HashArguments, "--init", "--", "sleep", "60")...)
	testkit.Eventually(t, "answer", testhost.Answers(url))
	for range 20 {
		request, _ := http.NewRequest("POST", url+"/command", strings.NewReader(`{"command":"for i in 1 2 3 4 5; do (sleep 0.02 & ) ; done; exit 9"}`))
		request.Header.Set(httpx.TokenHeader, testkit.Token)
		response, err := http.DefaultTransport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		testkit.Equal(t, true, strings.Contains(string(body), `"evalue":"9"`))
	}
	testkit.Eventually(t, "no child but the entrypoint", func() bool {
		data, _ := os.ReadFile("/proc/" + strconv.Itoa(process.Pid) + "/task/" + strconv.Itoa(process.Pid) + "/children")
		others, _ := filepath.Glob("/proc/" + strconv.Itoa(process.Pid) + "/task/*/children")
		count := len(strings.Fields(string(data)))
		for _, other := range others {
			text, _ := os.ReadFile(other)
			if !strings.Contains(other, "/task/"+strconv.Itoa(process.Pid)+"/") {
				count += len(strings.Fields(string(text)))
			}
		}
		return count == 1
	})
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
	process, url, _ := testhost.Daemon(t, []string{
		"EXECD_BOOTSTRAP_PRE_SCRIPT=" + script, "OPENSANDBOX_LIFECYCLE=" + hooks,
		"BOOTSTRAP_CMD=echo main $FROM_SCRIPT ${OPENSANDBOX_LIFECYCLE-none} >>" + log + "; sleep 1.4; exit 9",
	}, "--access-token-sha256", server.HashToken(testkit.Token), "--init", "--", "false")
	testkit.Eventually(t, "in time", func() bool {
		response, err := http.Get(url + "/ready")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == 200
	})
	testkit.Equal(t, 9, testhost.ExitOf(t, process))
	lines := strings.Split(testkit.MustRead(t, log), "\n")
	testkit.Equal(t, []string{"pre a b", "main a b none", "tick"}, lines[:3])

	process, _, stderr := testhost.Daemon(t, []string{`OPENSANDBOX_LIFECYCLE={"preStart":{"command":["sh","-c","exit 4"]}}`},
		"--access-token-sha256", server.HashToken(testkit.Token), "--init", "--", "touch", directory+"/never")
	testkit.Equal(t, 1, testhost.ExitOf(t, process))
	testkit.Equal(t, true, strings.Contains(stderr(), "preStart: exit status 4"))
	process, _, _ = testhost.Daemon(t, []string{`OPENSANDBOX_LIFECYCLE={"preStart":{"command":["sleep","60"],"timeoutSeconds":1}}`},
		"--access-token-sha256", server.HashToken(testkit.Token), "--init", "--", "touch", directory+"/never")
	testkit.Equal(t, 1, testhost.ExitOf(t, process))
	process, _, _ = testhost.Daemon(t, []string{`OPENSANDBOX_LIFECYCLE={"preStart":[]}`},
		"--access-token-sha256", server.HashToken(testkit.Token), "--init", "--", "touch", directory+"/never")
	testkit.Equal(t, 2, testhost.ExitOf(t, process))
	_, err := os.Stat(directory + "/never")
	testkit.Equal(t, true, os.IsNotExist(err))
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
		process, _, stderr := testhost.Daemon(t, []string{c.before}, append(testhost.HashArguments, c.arguments...)...)
		testkit.Eventually(t, "began", func() bool { return strings.Contains(stderr(), ".\n") })
		_, text, _ := strings.Cut(stderr(), "began ")
		text, _, _ = strings.Cut(text, ".\n")
		group, err := strconv.Atoi(text)
		testkit.Equal(t, true, err == nil && syscall.Kill(-group, 0) == nil)
		syscall.Kill(process.Pid, syscall.SIGTERM)
		testkit.Equal(t, c.status, testhost.ExitOf(t, process))
		testkit.Eventually(t, "what it ran is gone", func() bool { return syscall.Kill(-group, 0) != nil })
	}
	_, err := os.Stat(directory + "/never")
	testkit.Equal(t, true, os.IsNotExist(err))
}

func TestAnInitStartsTheEntrypointAgain(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	process, url, _ := testhost.Daemon(t, nil, "--runtime-init", "--init", "--", "sh", "-c", "echo $OPENSANDBOX_ID. >>"+log+"; sleep 60")
	testkit.Eventually(t, "in time", func() bool { data, _ := os.ReadFile(log); return string(data) == ".\n" })
	response, err := http.Post(url+"/internal/init", "", strings.NewReader(
		`{"sandboxId":"me","generation":1,"accessTokenHash":"sha256:`+server.HashToken("x")+`","entrypointPolicy":"restart"}`))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	testkit.Equal(t, 200, response.StatusCode)
	testkit.Eventually(t, "in time", func() bool { return testkit.MustRead(t, log) == ".\nme.\n" })
	process.SignalGroup(15)
	testkit.Equal(t, 143, testhost.ExitOf(t, process))
}

func TestAnInitDoesNotUndoTheEnd(t *testing.T) {
	directory := t.TempDir()
	process, url, stderr := testhost.Daemon(t, nil, "--runtime-init", "--init", "--", "sh", "-c",
		`trap 'echo term; while [ ! -e `+directory+`/go ]; do sleep 0.02; done; exit 5' TERM; echo up; while :; do sleep 0.02; done`)
	testkit.Eventually(t, "up", func() bool { return strings.Contains(stderr(), "up\n") && testhost.Answers(url)() })
	syscall.Kill(process.Pid, syscall.SIGTERM)
	testkit.Eventually(t, "term", func() bool { return strings.Contains(stderr(), "term\n") })
	response, err := http.Post(url+"/internal/init", "", strings.NewReader(
		`{"sandboxId":"me","generation":1,"accessTokenHash":"sha256:`+server.HashToken("x")+`","entrypointPolicy":"restart","preserveRuntimeState":true}`))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	testkit.Equal(t, 200, response.StatusCode)
	testkit.Equal(t, nil, os.WriteFile(directory+"/go", nil, 0o600))
	testkit.Equal(t, 5, testhost.ExitOf(t, process))
	testkit.Equal(t, 1, strings.Count(stderr(), "up\n"))
}

// No caller waits for another caller's preStart, with or without permission to call init.
func TestInitsDoNotQueue(t *testing.T) {
	process, url, _ := testhost.Daemon(t, nil, "--runtime-init")
	post := func(token, hook string) int {
		request, err := http.NewRequest(http.MethodPost, url+"/internal/init", strings.NewReader(
			`{"sandboxId":"me","generation":1,"accessTokenHash":"sha256:`+server.HashToken("x")+`","lifecycle":`+hook+`}`))
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
	testkit.Eventually(t, "it listens", func() bool {
		response, err := http.Get(url + "/ping")
		if err == nil {
			response.Body.Close()
		}
		return err == nil
	})
	began, first := filepath.Join(t.TempDir(), "began"), make(chan int, 1)
	go func() { first <- post("", `{"preStart":{"command":["sh","-c","touch `+began+`; sleep 60"]}}`) }()
	testkit.Eventually(t, "the first is under way", func() bool { _, err := os.Stat(began); return err == nil })
	testkit.Equal(t, 401, post("", "null"))
	testkit.Equal(t, 409, post("x", "null"))
	testkit.Equal(t, 0, <-first)
	process.SignalGroup(9)
	testhost.ExitOf(t, process)
}

// A restored daemon finds another content of its launch file.
func TestAnotherLaunchUnbindsEverything(t *testing.T) {
	directory := t.TempDir()
	launch, ticks := filepath.Join(directory, "launch"), filepath.Join(directory, "ticks")
	write := func(path, text string) {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put := func(text string) { write(launch, text) }
	put(server.HashToken("first") + "\n")
	write(ticks, "")
	hooks := `{"periodic":[{"name":"tick","schedule":"@every 1s","command":["sh","-c","echo >>` + ticks + `"]}]}`
	process, url, stderr := testhost.Daemon(t, []string{"OPENSANDBOX_LIFECYCLE=" + hooks},
		"--access-token-sha256", server.HashToken("old"), "--launch-file", launch)
	client := &http.Client{}
	call := func(client *http.Client, method, path, token, body string) int {
		request, err := http.NewRequest(method, url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set(httpx.TokenHeader, token)
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
			generation, server.HashToken(token))
	}
	testkit.Eventually(t, "it serves", func() bool { return call(client, "GET", "/metrics", "old", "") == 200 })
	testkit.Equal(t, 404, call(client, "POST", "/internal/init", "old", body(9, "x"))) // the daemon was not restored
	watching := make(chan int, 1)
	go func() { watching <- call(&http.Client{}, "GET", "/metrics/watch", "old", "") }()

	for _, unreadable := range []string{"", server.HashToken("second"), strings.Repeat("x", 64) + "\n"} {
		put(unreadable)
		testkit.Equal(t, 503, call(client, "GET", "/metrics", "old", ""))
	}
	put(server.HashToken("first") + "\n")
	testkit.Equal(t, 200, call(client, "GET", "/metrics", "old", ""))

	for generation, name := range []string{"second", "third"} { // the second init has generation 0 again
		put(server.HashToken(name) + "\n")
		fresh := &http.Client{Transport: &http.Transport{}}
		testkit.Equal(t, 503, call(fresh, "GET", "/metrics", "old", ""))
		testkit.Equal(t, 503, call(fresh, "GET", "/ready", "old", ""))
		testkit.Equal(t, 200, call(fresh, "GET", "/ping", "", ""))
		for _, other := range []string{"", "old", "first", "new"} {
			testkit.Equal(t, 401, call(fresh, "POST", "/internal/init", other, body(1, "new")))
		}
		testkit.Equal(t, 200, call(fresh, "POST", "/internal/init", name, body(1-generation, "new")))
		testkit.Equal(t, 200, call(fresh, "GET", "/ready", "", ""))
		testkit.Equal(t, 200, call(fresh, "GET", "/metrics", "new", ""))
		for _, other := range []string{"", "old", name} {
			testkit.Equal(t, 401, call(fresh, "GET", "/metrics", other, ""))
			testkit.Equal(t, 401, call(fresh, "POST", "/internal/init", other, body(2, "x")))
		}
	}
	select {
	case <-watching: // the connection was closed
	case <-time.After(5 * time.Second):
		t.Fatal("a stream from before goes on")
	}
	size := len(testkit.MustRead(t, ticks))
	testkit.Eventually(t, "the hooks run on", func() bool { return len(testkit.MustRead(t, ticks)) > size+1 })
	testkit.Equal(t, 2, strings.Count(stderr(), "restored from a checkpoint"))
	process.SignalGroup(9)
	testhost.ExitOf(t, process)

	process, _, _ = testhost.Daemon(t, nil, "--insecure-no-token", "--launch-file", directory+"/none")
	testkit.Equal(t, 2, testhost.ExitOf(t, process))
}

func TestNoProgramStartsBeforeAnAwaitedInit(t *testing.T) {
	process, url, stderr := testhost.Daemon(t, nil, append(testhost.HashArguments, "--init", "--await-init", "--", "sh", "-c", "echo usual; sleep 60")...)
	testkit.Eventually(t, "answer", testhost.Answers(url))
	call := func(body string) int {
		request, _ := http.NewRequest("POST", url+"/internal/init", strings.NewReader(body))
		request.Header.Set(httpx.TokenHeader, testkit.Token)
		response, err := http.DefaultTransport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		return response.StatusCode
	}
	children := func() string {
		data, _ := os.ReadFile("/proc/" + strconv.Itoa(process.Pid) + "/task/" + strconv.Itoa(process.Pid) + "/children")
		return string(data)
	}
	testkit.Equal(t, "", children())
	testkit.Equal(t, 200, call(`{"sandboxId":"new","generation":1,"accessTokenHash":"sha256:`+server.HashToken("fresh")+
		`","envs":{"BOUND":"b c"},"lifecycle":{"preStart":{"command":["sh","-c","echo hook $BOUND >&2"]}},"entrypoint":["sh","-c","echo given $BOUND $OPENSANDBOX_ID; exit 7"]}`))
	testkit.Equal(t, 7, testhost.ExitOf(t, process))
	testkit.Equal(t, true, strings.Contains(stderr(), "hook b c\ngiven b c new\n"))
	testkit.Equal(t, false, strings.Contains(stderr(), "usual"))
}

func TestASignalEndsADaemonThatAwaitsItsInit(t *testing.T) {
	process, url, _ := testhost.Daemon(t, nil, append(testhost.HashArguments, "--init", "--await-init", "--", "sleep", "60")...)
	testkit.Eventually(t, "answer", testhost.Answers(url))
	syscall.Kill(process.Pid, syscall.SIGTERM)
	testkit.Equal(t, 143, testhost.ExitOf(t, process))
}

func TestAwaitInitNeedsInit(t *testing.T) {
	process, _, stderr := testhost.Daemon(t, nil, append(testhost.HashArguments, "--await-init")...)
	testkit.Equal(t, 2, testhost.ExitOf(t, process))
	testkit.Equal(t, true, strings.Contains(stderr(), "--await-init needs --init"))
}

package main

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

func TestStartWithoutATokenIsRefused(t *testing.T) {
	process, _, stderr := daemon(t, nil)
	equal(t, 2, exitOf(t, process))
	equal(t, true, strings.Contains(stderr(), "no access token"))
	process, _, _ = daemon(t, nil, "--no-such-flag")
	equal(t, 2, exitOf(t, process))
}

func TestEntrypointStatusIsTheDaemonsStatus(t *testing.T) {
	for _, c := range []struct {
		entrypoint []string
		status     int
	}{
		{[]string{"sh", "-c", "exit 7"}, 7}, {[]string{"true"}, 0}, {[]string{"sh", "-c", "kill -KILL $$"}, 137},
		{[]string{"no-such-program"}, 127}, {[]string{"/no/such"}, 127}, {[]string{"/etc/passwd"}, 126},
	} {
		process, _, _ := daemon(t, nil, append(append(hashArguments, "--init", "--"), c.entrypoint...)...)
		equal(t, c.status, exitOf(t, process))
	}
}

func TestSignalsReachTheEntrypointsGroup(t *testing.T) {
	process, url, stderr := daemon(t, nil, append(hashArguments, "--init", "--", "sh", "-c",
		`trap 'echo usr1' USR1; trap 'echo term; exit 5' TERM; echo up; while :; do sleep 0.05; done`)...)
	eventually(t, "up", func() bool { return strings.Contains(stderr(), "up\n") && answers(url)() })
	syscall.Kill(process.Pid, syscall.SIGUSR1)
	eventually(t, "usr1", func() bool { return strings.Contains(stderr(), "usr1\n") })
	syscall.Kill(process.Pid, syscall.SIGTERM)
	equal(t, 5, exitOf(t, process))
}

func TestAnEntrypointThatIgnoresTermIsKilledAfterTheGrace(t *testing.T) {
	process, _, stderr := daemon(t, nil, append(hashArguments, "--stop-grace", "300ms", "--init", "--", "sh", "-c",
		`trap '' TERM; echo up; while :; do sleep 60; done`)...)
	eventually(t, "up", func() bool { return strings.Contains(stderr(), "up\n") })
	syscall.Kill(process.Pid, syscall.SIGTERM)
	equal(t, 137, exitOf(t, process))
}

func TestTheIdleEntrypointNeedsNoTail(t *testing.T) {
	process, url, _ := daemon(t, []string{"PATH=/nowhere"}, append(hashArguments, "--init", "--", "tail", "-f", "/dev/null")...)
	eventually(t, "answer", answers(url))
	syscall.Kill(process.Pid, syscall.SIGTERM)
	equal(t, 143, exitOf(t, process))
}

func TestAClearTokenLeavesNoTraceAndWorks(t *testing.T) {
	process, url, stderr := daemon(t, []string{"EXECD_ACCESS_TOKEN=" + testToken}, "--init", "--", "sleep", "60")
	eventually(t, "answer", answers(url))
	for _, name := range []string{"cmdline", "environ"} {
		data, err := os.ReadFile("/proc/" + strconv.Itoa(process.Pid) + "/" + name)
		if err != nil {
			t.Skip("not readable: ", err)
		}
		equal(t, false, strings.Contains(string(data), testToken))
	}
	request, _ := http.NewRequest("GET", url+"/metrics", nil)
	request.Header.Set(tokenHeader, testToken)
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	equal(t, 200, response.StatusCode)
	equal(t, false, strings.Contains(stderr(), testToken))
}

func TestOrphansAreReapedWhileCommandsKeepTheirStatuses(t *testing.T) {
	process, url, _ := daemon(t, nil, append(hashArguments, "--init", "--", "sleep", "60")...)
	eventually(t, "answer", answers(url))
	for range 20 {
		request, _ := http.NewRequest("POST", url+"/command", strings.NewReader(`{"command":"for i in 1 2 3 4 5; do (sleep 0.02 & ) ; done; exit 9"}`))
		request.Header.Set(tokenHeader, testToken)
		response, err := http.DefaultTransport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		equal(t, true, strings.Contains(string(body), `"evalue":"9"`))
	}
	eventually(t, "no child but the entrypoint", func() bool {
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

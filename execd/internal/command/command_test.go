package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

type fixture struct {
	*testkit.Client
	commands *Commands
	envFile  string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	launcher, envFile := testhost.Launcher(t)
	commands := New(launcher)
	interrupt := httpx.Route{Method: "DELETE", Path: "/command", Handler: httpx.Always(commands.Interrupt)}
	return &fixture{testkit.NewClient(t, testhost.Handle(append(commands.Routes(), interrupt)...)), commands, envFile}
}

func TestOutputKeepsLineTerminators(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": `printf 'a\n\nb\r\nc\rd'; printf 'e\n' >&2`})
	testkit.Equal(t, []string{"a\n", "\n", "b\r\n", "c\r", "d"}, result.Stdout)
	testkit.Equal(t, []string{"e\n"}, result.Stderr)
	testkit.Equal(t, "execution_complete", result.Last.Type)
}

func TestStreamIsAsciiAndJoinsSplitSequences(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": `printf '\303'; sleep 0.05; printf '\251\342\200\250 \360\237\230\200 \377\n'`})
	testkit.Equal(t, []string{"é\u2028 😀 \ufffd\n"}, result.Stdout)
	for _, c := range result.Raw {
		if c >= 0x80 {
			t.Fatal("a byte outside ASCII")
		}
	}
}

func TestCarriageReturnSplitFromItsNewlineIsOneTerminator(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": `printf 'a\r'; sleep 0.02; printf '\nb\r'; sleep 0.3; printf '\n'`})
	testkit.Equal(t, []string{"a\r\n", "b\r", "\n"}, result.Stdout)
}

func TestVeryLongLineIsCutBelowOneMebibyteAndNothingIsLost(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": `head -c 3000000 /dev/zero | tr '\0' '\001'; printf 'é%.0s' $(seq 100000)`})
	testkit.Equal(t, 3000000+200000, len(strings.Join(result.Stdout, "")))
	for frame := range strings.SplitSeq(string(result.Raw), "\n\n") {
		if len(frame) >= 1<<20 {
			t.Fatalf("an event of %d bytes", len(frame))
		}
	}
	testkit.Equal(t, false, strings.Contains(strings.Join(result.Stdout, ""), "\ufffd"))
}

func TestExitCodesTravelInTheErrorEvent(t *testing.T) {
	f := newFixture(t)
	for _, c := range []struct{ command, value, trace string }{
		{"exit 7", "7", "exit status 7"},
		{"no-such-program-anywhere", "127", "exit status 127"},
		{"kill -KILL $$", "-1", "signal: killed"},
		{"kill -TERM $$", "-1", "signal: terminated"},
	} {
		result := f.Run(testkit.Object{"command": c.command})
		testkit.Equal(t, "error", result.Last.Type)
		testkit.Equal(t, "CommandExecError", result.Last.Error.Ename)
		testkit.Equal(t, c.value, result.Last.Error.Evalue)
		testkit.Equal(t, []string{c.trace}, result.Last.Error.Traceback)
	}
}

func TestArgvIsNotInterpreted(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"argv": []string{"printf", "%s|", "$HOME", "", "a b", "*"}, "command": nil})
	testkit.Equal(t, []string{"$HOME||a b|*|"}, result.Stdout)
	_, status := f.Call("GET", "/command/status/"+result.ID, "")
	var decoded commandStatus
	if err := json.Unmarshal([]byte(status), &decoded); err != nil {
		t.Fatal(err)
	}
	testkit.Equal(t, "printf '%s|' '$HOME' '' 'a b' '*'", decoded.Content)
}

func TestArgvProgramMissingIsAnErrorEventWithText(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"argv": []string{"no-such-program"}})
	testkit.Equal(t, "error", result.Last.Type)
	if _, err := strconv.Atoi(result.Last.Error.Evalue); err == nil {
		t.Fatal("the value looks like an exit code")
	}
	status, body := f.Call("GET", "/command/status/"+result.ID, "")
	testkit.Equal(t, 200, status)
	testkit.Equal(t, true, strings.Contains(body, `"running":false,"exit_code":255`))
}

func TestRelativeProgramIsResolvedInTheWorkingDirectory(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	if err := os.WriteFile(directory+"/tool", []byte("#!/bin/sh\npwd\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	result := f.Run(testkit.Object{"argv": []string{"./tool"}, "cwd": directory})
	testkit.Equal(t, []string{directory + "\n"}, result.Stdout)
	result = f.Run(testkit.Object{"argv": []string{"tool"}, "envs": testkit.Object{"PATH": "relative:" + directory}})
	testkit.Equal(t, "/\n", strings.Join(result.Stdout, ""))
}

func TestInvalidRequestsAreRefusedBeforeAnythingRuns(t *testing.T) {
	f := newFixture(t)
	for _, body := range []string{
		"", "{", `[]`, `{}`, `{"command":null}`, `{"command":""}`, `{"command":"true","argv":["true"]}`, `{"argv":[]}`,
		`{"argv":[""]}`, `{"argv":["a\u0000b"]}`, `{"argv":["a",null]}`, `{"command":"a\u0000"}`, `{"command":5}`,
		`{"command":"true","timeout":-1}`, `{"command":"true","gid":5}`, `{"command":"true","uid":-1}`,
		`{"command":"true","uid":4294967295}`, `{"command":"true","cwd":"/no/such/directory"}`, `{"command":"true","cwd":"/etc/passwd"}`,
		`{"command":"true","cwd":"$NO_SUCH_VARIABLE"}`, `{"command":"true","envs":{"A=B":"c"}}`, `{"command":"true","envs":{"A":"\u0000"}}`,
	} {
		status, answer := f.Call("POST", "/command", body)
		testkit.Equal(t, 400, status)
		var decoded struct{ Code, Message string }
		if err := json.Unmarshal([]byte(answer), &decoded); err != nil || decoded.Message == "" {
			t.Fatalf("%s: %s", body, answer)
		}
		testkit.Equal(t, httpx.CodeInvalidBody, decoded.Code)
	}
}

func TestNullsAndUnknownFieldsAreAccepted(t *testing.T) {
	f := newFixture(t)
	status, body := f.Call("POST", "/command", `{"command":"echo ok","cwd":null,"background":false,"timeout":null,"uid":null,"gid":null,"envs":null,"x":1} trailing`)
	testkit.Equal(t, 200, status)
	testkit.Equal(t, true, strings.Contains(body, `"text":"ok\n"`))
}

func TestWorkingDirectoryExpandsWithTheCommandsEnvironment(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	result := f.Run(testkit.Object{"command": "pwd", "cwd": "${WHERE}/.", "envs": testkit.Object{"WHERE": directory}})
	testkit.Equal(t, []string{directory + "\n"}, result.Stdout)
}

func TestEnvironmentPrecedenceAndCredentials(t *testing.T) {
	f := newFixture(t)
	if err := os.WriteFile(f.envFile, []byte("FIXTURE='file'\nOTHER=\"x$FIXTURE\"\nbad line\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	result := f.Run(testkit.Object{"command": `echo "$FIXTURE $OTHER $MORE ${EXECD_ACCESS_TOKEN-none} $EXECD_ENVS"`, "envs": testkit.Object{"MORE": "request"}})
	testkit.Equal(t, []string{"file xdaemon request none " + f.envFile + "\n"}, result.Stdout)
}

func TestTimeoutKillsTheWholeGroupPromptly(t *testing.T) {
	f := newFixture(t)
	begin := time.Now()
	result := f.Run(testkit.Object{"command": "sleep 60 & echo $!; trap '' TERM; sleep 60; sleep 60", "timeout": 200})
	testkit.Equal(t, "-1", result.Last.Error.Evalue)
	testkit.Equal(t, []string{"signal: killed", "timeout after 200ms"}, result.Last.Error.Traceback)
	if elapsed := time.Since(begin); elapsed > 2*time.Second {
		t.Fatal(elapsed)
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(result.Stdout[0]))
	testkit.Eventually(t, "the descendant is gone", func() bool { return gone(pid) })
}

// gone reports whether a process has ended, including a zombie that another process must reap.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestOpenOutputOfADaemonDelaysTheEndByTheTailWindowOnly(t *testing.T) {
	f := newFixture(t)
	begin := time.Now()
	result := f.Run(testkit.Object{"command": "sleep 60 & echo $!"})
	testkit.Equal(t, "execution_complete", result.Last.Type)
	if elapsed := time.Since(begin); elapsed > 2*time.Second {
		t.Fatal(elapsed)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(result.Stdout[0]))
	if err != nil || syscall.Kill(pid, 0) != nil {
		t.Fatal("what a finished command left behind was killed")
	}
	syscall.Kill(pid, syscall.SIGKILL)
}

func TestEndlessOutputOfADaemonDoesNotHoldTheResponse(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": "yes & echo $! >&2"})
	testkit.Equal(t, "execution_complete", result.Last.Type)
	pid, _ := strconv.Atoi(strings.TrimSpace(result.Stderr[0]))
	testkit.Equal(t, false, gone(pid)) // it continues, and its output is dropped
	syscall.Kill(pid, syscall.SIGKILL)
	testkit.Eventually(t, "its pipe is closed", func() bool { return f.commands.Leftovers.Count() == 0 })
}

func TestBigOutputArrivesCompletely(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": "seq 1 200000"})
	text := strings.Join(result.Stdout, "")
	testkit.Equal(t, 200000, len(result.Stdout))
	testkit.Equal(t, true, strings.HasPrefix(text, "1\n2\n") && strings.HasSuffix(text, "\n200000\n"))
}

func TestInterruptEndsARunningCommand(t *testing.T) {
	f := newFixture(t)
	id, reader, _ := f.Begin(testkit.Object{"command": "sleep 60"})
	testkit.Equal(t, 32, len(id))
	_, status := f.Call("GET", "/command/status/"+id, "")
	testkit.Equal(t, true, strings.Contains(status, `"running":true`) && !strings.Contains(status, "exit_code"))
	code, body := f.Call("DELETE", "/command?id="+id, "")
	testkit.Equal(t, 200, code)
	testkit.Equal(t, "", body)
	rest, _ := io.ReadAll(reader)
	testkit.Equal(t, true, strings.Contains(string(rest), `"evalue":"-1","traceback":["signal: terminated"]`))
	code, _ = f.Call("DELETE", "/command?id="+id, "")
	testkit.Equal(t, 200, code) // a client whose answer was lost repeats the request
	code, _ = f.Call("DELETE", "/command", "")
	testkit.Equal(t, 400, code)
	code, _ = f.Call("DELETE", "/command?id=unknown", "")
	testkit.Equal(t, 500, code)
}

func TestInterruptKillsWhatIgnoresIt(t *testing.T) {
	f := newFixture(t)
	id, reader, _ := f.Begin(testkit.Object{"command": "trap '' TERM; echo ready; sleep 60; sleep 60; sleep 60"})
	for line, err := reader.ReadString('\n'); !strings.Contains(line, "ready"); line, err = reader.ReadString('\n') {
		if err != nil {
			t.Fatal(err)
		}
	}
	f.Call("DELETE", "/command?id="+id, "")
	begin := time.Now()
	rest, _ := io.ReadAll(reader)
	testkit.Equal(t, true, strings.Contains(string(rest), "signal: killed"))
	if elapsed := time.Since(begin); elapsed > 5*time.Second {
		t.Fatal(elapsed)
	}
}

func TestDisconnectLeavesTheCommandRunning(t *testing.T) {
	f := newFixture(t)
	flag := filepath.Join(t.TempDir(), "flag")
	id, _, response := f.Begin(testkit.Object{"command": "sleep 0.3; echo text; echo done > " + flag})
	response.Body.Close()
	testkit.Eventually(t, "the command finished", func() bool {
		_, status := f.Call("GET", "/command/status/"+id, "")
		return strings.Contains(status, `"running":false,"exit_code":0`)
	})
	if _, err := os.Stat(flag); err != nil {
		t.Fatal(err)
	}
}

func TestPingsAreSentWhileACommandIsSilent(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": "sleep 3.2"})
	testkit.Equal(t, 2, strings.Count(string(result.Raw), `"type":"ping","text":"pong"`))
}

func TestBackgroundCommandAnswersAtOnceAndKeepsItsOutput(t *testing.T) {
	f := newFixture(t)
	begin := time.Now()
	result := f.Run(testkit.Object{"command": "echo one; sleep 0.5; echo two >&2; exit 3", "background": true})
	testkit.Equal(t, "execution_complete", result.Last.Type)
	if time.Since(begin) > 400*time.Millisecond {
		t.Fatal("the answer waited")
	}
	text, cursor := "", "0"
	testkit.Eventually(t, "all output", func() bool {
		response := f.Do("GET", "/command/"+result.ID+"/logs?cursor="+cursor, nil)
		page, _ := io.ReadAll(response.Body)
		text += string(page)
		cursor = response.Header.Get("EXECD-COMMANDS-TAIL-CURSOR")
		return text == "one\ntwo\n"
	})
	testkit.Equal(t, "8", cursor)
	testkit.Eventually(t, "the end", func() bool {
		_, status := f.Call("GET", "/command/status/"+result.ID, "")
		return strings.Contains(status, `"running":false,"exit_code":3`)
	})
	for path, expected := range map[string]int{"?cursor=99": 200, "?cursor=-1": 400, "?cursor=x": 200} {
		status, _ := f.Call("GET", "/command/"+result.ID+"/logs"+path, "")
		testkit.Equal(t, expected, status)
	}
	foreground := f.Run(testkit.Object{"command": "true"})
	status, _ := f.Call("GET", "/command/"+foreground.ID+"/logs", "")
	testkit.Equal(t, 400, status)
	status, body := f.Call("GET", "/command/status/0123", "")
	testkit.Equal(t, 404, status)
	testkit.Equal(t, true, strings.Contains(body, `"code":"INVALID_REQUEST_BODY"`) && strings.Contains(body, "command not found: 0123"))
}

func TestBackgroundOutputStaysWhereItsStreamsAreOpenedAnew(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": "echo one; echo two >/dev/stderr; (echo three >/dev/stdout); echo four >/proc/$$/fd/1; echo five", "background": true})
	testkit.Eventually(t, "the end", func() bool {
		_, status := f.Call("GET", "/command/status/"+result.ID, "")
		return strings.Contains(status, `"running":false`)
	})
	_, text := f.Call("GET", "/command/"+result.ID+"/logs", "")
	testkit.Equal(t, "one\ntwo\nthree\nfour\nfive\n", text)
}

func TestOutputOfWhatABackgroundCommandLeavesIsKept(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": "(sleep 0.3; echo late) & echo early", "background": true})
	testkit.Eventually(t, "the end", func() bool {
		_, status := f.Call("GET", "/command/status/"+result.ID, "")
		return strings.Contains(status, `"running":false`)
	})
	testkit.Eventually(t, "the rest", func() bool {
		_, text := f.Call("GET", "/command/"+result.ID+"/logs", "")
		return text == "early\nlate\n"
	})
}

func TestTwoHundredParallelCommandsGetTheirOwnStatus(t *testing.T) {
	f := newFixture(t)
	var group sync.WaitGroup
	for i := range 200 {
		group.Go(func() {
			result := f.Run(testkit.Object{"command": fmt.Sprintf("(sleep 0.01 &) ; echo %d; exit %d", i, i%100+1)})
			if result.Last.Error == nil || result.Last.Error.Evalue != strconv.Itoa(i%100+1) || strings.Join(result.Stdout, "") != fmt.Sprintf("%d\n", i) {
				t.Errorf("%d: %+v", i, result.Last)
			}
		})
	}
	group.Wait()
}

func TestCommandsBeyondTheLimitAreRefused(t *testing.T) {
	f := newFixture(t)
	f.commands.Slots = process.NewSlots(1)
	id, reader, _ := f.Begin(testkit.Object{"command": "sleep 60"})
	status, _ := f.Call("POST", "/command", `{"command":"true"}`)
	testkit.Equal(t, 503, status)
	f.Call("DELETE", "/command?id="+id, "")
	_, _ = io.ReadAll(reader)
	testkit.Eventually(t, "room for a command", func() bool {
		status, _ = f.Call("POST", "/command", `{"command":"true"}`)
		return status == 200
	})
}

func TestIdentityOfACommand(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"argv": []string{"id"}, "uid": 12345})
	testkit.Equal(t, []string{"uid=12345 gid=12345 groups=12345\n"}, result.Stdout)
	result = f.Run(testkit.Object{"argv": []string{"id", "-u"}, "uid": 65534, "gid": 7})
	testkit.Equal(t, []string{"65534\n"}, result.Stdout)
}

func TestChildrenStartClean(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{"command": `ls -l /proc/self/fd | grep -c pipe; readlink /proc/self/fd/0; grep -E 'SigIgn|SigBlk' /proc/self/status; ps -o pgid=,sid= $$ | tr -s ' '`})
	testkit.Equal(t, "2\n", result.Stdout[0])
	testkit.Equal(t, "/dev/null\n", result.Stdout[1])
	testkit.Equal(t, "SigBlk:\t0000000000000000\n", result.Stdout[2])
	testkit.Equal(t, "SigIgn:\t0000000000000000\n", result.Stdout[3])
	ids := strings.Fields(result.Stdout[4])
	testkit.Equal(t, ids[0], ids[1])
}

func TestChildrenGoBeforeTheDaemonWhenMemoryRunsOut(t *testing.T) {
	f := newFixture(t)
	result := f.Run(testkit.Object{
		"command": `until grep -qx 500 /proc/$$/oom_score_adj; do :; done; cat /proc/self/oom_score_adj`,
		"timeout": 5000,
	})
	testkit.Equal(t, []string{"500\n"}, result.Stdout)
}

func TestAnswerWithoutItsTerminalEventIsAborted(t *testing.T) {
	f := newFixture(t)
	for name, request := range map[string]testkit.Object{
		"success":         {"command": "true"},
		"failure":         {"command": "exit 3"},
		"missing program": {"argv": []string{"/nowhere"}},
		"background":      {"command": "true", "background": true},
	} {
		body, err := json.Marshal(request)
		testkit.Equal(t, nil, err)
		testkit.AbortedOnlyIfBroken(t, name, func(w http.ResponseWriter) {
			f.commands.run(w, httptest.NewRequest("POST", "/command", bytes.NewReader(body)))
		})
	}
}

func TestFinishedRecordsAreBounded(t *testing.T) {
	records := NewRecords()
	for range finishedLimit + 100 {
		r := &record{id: httpx.ID(), done: make(chan struct{})}
		records.add(r)
		records.finish(r, process.Outcome{})
	}
	testkit.Equal(t, finishedLimit, len(records.byID))
}

func TestFinishedCommandsAreForgottenAfterADayWithinTheHour(t *testing.T) {
	f := newFixture(t)
	records := f.commands.records
	var ids []string
	for _, command := range []string{"true", "true", "sleep 60"} {
		ids = append(ids, f.Run(testkit.Object{"command": command, "background": true}).ID)
	}
	old, young, running := records.get(ids[0]), records.get(ids[1]), records.get(ids[2])
	t.Cleanup(func() { running.process.SignalGroup(syscall.SIGKILL) })
	<-old.done
	<-young.done
	age := func(r *record, by time.Duration) { // the table is ordered by finished
		r.started, r.finished = r.started.Add(-by), r.finished.Add(-by)
	}
	testkit.Eventually(t, "both are in the table of finished ones", func() bool {
		records.mutex.Lock()
		defer records.mutex.Unlock()
		return len(records.ended) == 2
	})
	records.ended = []*record{old, young}
	age(old, recordAge+time.Minute)
	age(young, recordAge-time.Minute)
	running.started = running.started.Add(-2 * recordAge)
	for _, c := range []struct {
		swept time.Duration // time since the last sweep
		old   int
	}{{recordSweep - time.Minute, 200}, {recordSweep + time.Minute, 404}} {
		records.lastScan = time.Now().Add(-c.swept)
		for i, expected := range []int{c.old, 200, 200} {
			for _, path := range []string{"/command/status/" + ids[i], "/command/" + ids[i] + "/logs"} {
				status, _ := f.Call("GET", path, "")
				testkit.Equal(t, fmt.Sprint(path, expected), fmt.Sprint(path, status))
			}
		}
	}
	testkit.Equal(t, 0, old.output.Files())
}

func TestTextsOfARecordEndWithAWholeCharacter(t *testing.T) {
	f := newFixture(t)
	status := func(id string) (found commandStatus) {
		_, body := f.Call("GET", "/command/status/"+id, "")
		if err := json.Unmarshal([]byte(body), &found); err != nil {
			t.Fatal(err)
		}
		return found
	}
	for shift := range 4 {
		text := ": " + strings.Repeat("x", shift) + strings.Repeat("\U0001f600", recordTextLimit/4)
		for _, request := range []testkit.Object{{"command": text}, {"argv": []string{"true", text}}, {"argv": []string{"/" + text}}} {
			result := f.Run(request)
			rec := status(result.ID)
			for _, got := range []string{rec.Content, rec.Error} {
				if strings.ContainsRune(got, utf8.RuneError) || len(got) > recordTextLimit {
					t.Errorf("%d bytes, the end is %q", len(got), got[max(0, len(got)-9):])
				}
			}
			testkit.Equal(t, true, len(rec.Content) > recordTextLimit-4)
			if result.Last.Error != nil {
				testkit.Equal(t, result.Last.Error.Evalue, rec.Error)
				testkit.Equal(t, true, strings.HasSuffix(rec.Error, "file name too long"))
			}
		}
	}
	result := f.Run(testkit.Object{"argv": []string{strings.Repeat("\u20ac", 1<<20)}})
	for line := range bytes.Lines(result.Raw) {
		testkit.Equal(t, true, len(line) < 1<<20)
	}
	testkit.Equal(t, true, len(status(result.ID).Error) <= recordTextLimit)
}

package main

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
)

type commandFixture struct {
	*client
	commands *Commands
	envFile  string
}

func newCommandFixture(t *testing.T) *commandFixture {
	t.Helper()
	launcher, envFile := testLauncher(t)
	commands := NewCommands(launcher)
	interrupt := routeTo{"DELETE", "/command", always(commands.interrupt)}
	return &commandFixture{newClient(t, handle(append(commands.routes(), interrupt)...)), commands, envFile}
}

func TestOutputKeepsLineTerminators(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": `printf 'a\n\nb\r\nc\rd'; printf 'e\n' >&2`})
	equal(t, []string{"a\n", "\n", "b\r\n", "c\r", "d"}, result.stdout)
	equal(t, []string{"e\n"}, result.stderr)
	equal(t, "execution_complete", result.last.Type)
}

func TestStreamIsAsciiAndJoinsSplitSequences(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": `printf '\303'; sleep 0.05; printf '\251\342\200\250 \360\237\230\200 \377\n'`})
	equal(t, []string{"é\u2028 😀 \ufffd\n"}, result.stdout)
	for _, c := range result.raw {
		if c >= 0x80 {
			t.Fatal("a byte outside ASCII")
		}
	}
}

func TestCarriageReturnSplitFromItsNewlineIsOneTerminator(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": `printf 'a\r'; sleep 0.02; printf '\nb\r'; sleep 0.3; printf '\n'`})
	equal(t, []string{"a\r\n", "b\r", "\n"}, result.stdout)
}

func TestVeryLongLineIsCutBelowOneMebibyteAndNothingIsLost(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": `head -c 3000000 /dev/zero | tr '\0' '\001'; printf 'é%.0s' $(seq 100000)`})
	equal(t, 3000000+200000, len(strings.Join(result.stdout, "")))
	for frame := range strings.SplitSeq(string(result.raw), "\n\n") {
		if len(frame) >= 1<<20 {
			t.Fatalf("an event of %d bytes", len(frame))
		}
	}
	equal(t, false, strings.Contains(strings.Join(result.stdout, ""), "\ufffd"))
}

func TestExitCodesTravelInTheErrorEvent(t *testing.T) {
	f := newCommandFixture(t)
	for _, c := range []struct{ command, value, trace string }{
		{"exit 7", "7", "exit status 7"},
		{"no-such-program-anywhere", "127", "exit status 127"},
		{"kill -KILL $$", "-1", "signal: killed"},
		{"kill -TERM $$", "-1", "signal: terminated"},
	} {
		result := f.run(object{"command": c.command})
		equal(t, "error", result.last.Type)
		equal(t, "CommandExecError", result.last.Error.Ename)
		equal(t, c.value, result.last.Error.Evalue)
		equal(t, []string{c.trace}, result.last.Error.Traceback)
	}
}

func TestArgvIsNotInterpreted(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"argv": []string{"printf", "%s|", "$HOME", "", "a b", "*"}, "command": nil})
	equal(t, []string{"$HOME||a b|*|"}, result.stdout)
	_, status := f.call("GET", "/command/status/"+result.id, "")
	var decoded commandStatus
	if err := json.Unmarshal([]byte(status), &decoded); err != nil {
		t.Fatal(err)
	}
	equal(t, "printf '%s|' '$HOME' '' 'a b' '*'", decoded.Content)
}

func TestArgvProgramMissingIsAnErrorEventWithText(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"argv": []string{"no-such-program"}})
	equal(t, "error", result.last.Type)
	if _, err := strconv.Atoi(result.last.Error.Evalue); err == nil {
		t.Fatal("the value looks like an exit code")
	}
	status, body := f.call("GET", "/command/status/"+result.id, "")
	equal(t, 200, status)
	equal(t, true, strings.Contains(body, `"running":false,"exit_code":255`))
}

func TestRelativeProgramIsResolvedInTheWorkingDirectory(t *testing.T) {
	f := newCommandFixture(t)
	directory := t.TempDir()
	if err := os.WriteFile(directory+"/tool", []byte("#!/bin/sh\npwd\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	result := f.run(object{"argv": []string{"./tool"}, "cwd": directory})
	equal(t, []string{directory + "\n"}, result.stdout)
	result = f.run(object{"argv": []string{"tool"}, "envs": object{"PATH": "relative:" + directory}})
	equal(t, "/\n", strings.Join(result.stdout, ""))
}

func TestInvalidRequestsAreRefusedBeforeAnythingRuns(t *testing.T) {
	f := newCommandFixture(t)
	for _, body := range []string{
		"", "{", `[]`, `{}`, `{"command":null}`, `{"command":""}`, `{"command":"true","argv":["true"]}`, `{"argv":[]}`,
		`{"argv":[""]}`, `{"argv":["a\u0000b"]}`, `{"argv":["a",null]}`, `{"command":"a\u0000"}`, `{"command":5}`,
		`{"command":"true","timeout":-1}`, `{"command":"true","gid":5}`, `{"command":"true","uid":-1}`,
		`{"command":"true","uid":4294967295}`, `{"command":"true","cwd":"/no/such/directory"}`, `{"command":"true","cwd":"/etc/passwd"}`,
		`{"command":"true","cwd":"$NO_SUCH_VARIABLE"}`, `{"command":"true","envs":{"A=B":"c"}}`, `{"command":"true","envs":{"A":"\u0000"}}`,
	} {
		status, answer := f.call("POST", "/command", body)
		equal(t, 400, status)
		var decoded struct{ Code, Message string }
		if err := json.Unmarshal([]byte(answer), &decoded); err != nil || decoded.Message == "" {
			t.Fatalf("%s: %s", body, answer)
		}
		equal(t, codeInvalidBody, decoded.Code)
	}
}

func TestNullsAndUnknownFieldsAreAccepted(t *testing.T) {
	f := newCommandFixture(t)
	status, body := f.call("POST", "/command", `{"command":"echo ok","cwd":null,"background":false,"timeout":null,"uid":null,"gid":null,"envs":null,"x":1} trailing`)
	equal(t, 200, status)
	equal(t, true, strings.Contains(body, `"text":"ok\n"`))
}

func TestWorkingDirectoryExpandsWithTheCommandsEnvironment(t *testing.T) {
	f := newCommandFixture(t)
	directory := t.TempDir()
	result := f.run(object{"command": "pwd", "cwd": "${WHERE}/.", "envs": object{"WHERE": directory}})
	equal(t, []string{directory + "\n"}, result.stdout)
}

func TestEnvironmentPrecedenceAndCredentials(t *testing.T) {
	f := newCommandFixture(t)
	if err := os.WriteFile(f.envFile, []byte("FIXTURE='file'\nOTHER=\"x$FIXTURE\"\nbad line\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	result := f.run(object{"command": `echo "$FIXTURE $OTHER $MORE ${EXECD_ACCESS_TOKEN-none} $EXECD_ENVS"`, "envs": object{"MORE": "request"}})
	equal(t, []string{"file xdaemon request none " + f.envFile + "\n"}, result.stdout)
}

func TestTimeoutKillsTheWholeGroupPromptly(t *testing.T) {
	f := newCommandFixture(t)
	begin := time.Now()
	result := f.run(object{"command": "sleep 60 & echo $!; trap '' TERM; sleep 60; sleep 60", "timeout": 200})
	equal(t, "-1", result.last.Error.Evalue)
	equal(t, []string{"signal: killed", "timeout after 200ms"}, result.last.Error.Traceback)
	if elapsed := time.Since(begin); elapsed > 2*time.Second {
		t.Fatal(elapsed)
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(result.stdout[0]))
	eventually(t, "the descendant is gone", func() bool { return gone(pid) })
}

// gone also counts a zombie that somebody else has to reap.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestOpenOutputOfADaemonDelaysTheEndByTheTailWindowOnly(t *testing.T) {
	f := newCommandFixture(t)
	begin := time.Now()
	result := f.run(object{"command": "sleep 60 & echo $!"})
	equal(t, "execution_complete", result.last.Type)
	if elapsed := time.Since(begin); elapsed > 2*time.Second {
		t.Fatal(elapsed)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(result.stdout[0]))
	if err != nil || syscall.Kill(pid, 0) != nil {
		t.Fatal("what a finished command left behind was killed")
	}
	syscall.Kill(pid, syscall.SIGKILL)
}

func TestEndlessOutputOfADaemonDoesNotHoldTheResponse(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": "yes & echo $! >&2"})
	equal(t, "execution_complete", result.last.Type)
	pid, _ := strconv.Atoi(strings.TrimSpace(result.stderr[0]))
	equal(t, false, gone(pid)) // what it writes is dropped
	syscall.Kill(pid, syscall.SIGKILL)
	eventually(t, "its pipe is closed", func() bool { return f.commands.leftovers.count() == 0 })
}

func TestBigOutputArrivesCompletely(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": "seq 1 200000"})
	text := strings.Join(result.stdout, "")
	equal(t, 200000, len(result.stdout))
	equal(t, true, strings.HasPrefix(text, "1\n2\n") && strings.HasSuffix(text, "\n200000\n"))
}

func TestInterruptEndsARunningCommand(t *testing.T) {
	f := newCommandFixture(t)
	id, reader, _ := f.begin(object{"command": "sleep 60"})
	equal(t, 32, len(id))
	_, status := f.call("GET", "/command/status/"+id, "")
	equal(t, true, strings.Contains(status, `"running":true`) && !strings.Contains(status, "exit_code"))
	code, body := f.call("DELETE", "/command?id="+id, "")
	equal(t, 200, code)
	equal(t, "", body)
	rest, _ := io.ReadAll(reader)
	equal(t, true, strings.Contains(string(rest), `"evalue":"-1","traceback":["signal: terminated"]`))
	code, _ = f.call("DELETE", "/command?id="+id, "")
	equal(t, 200, code) // a repeat of a lost answer
	code, _ = f.call("DELETE", "/command", "")
	equal(t, 400, code)
	code, _ = f.call("DELETE", "/command?id=unknown", "")
	equal(t, 500, code)
}

func TestInterruptKillsWhatIgnoresIt(t *testing.T) {
	f := newCommandFixture(t)
	id, reader, _ := f.begin(object{"command": "trap '' TERM; echo ready; sleep 60; sleep 60; sleep 60"})
	for line, err := reader.ReadString('\n'); !strings.Contains(line, "ready"); line, err = reader.ReadString('\n') {
		if err != nil {
			t.Fatal(err)
		}
	}
	f.call("DELETE", "/command?id="+id, "")
	begin := time.Now()
	rest, _ := io.ReadAll(reader)
	equal(t, true, strings.Contains(string(rest), "signal: killed"))
	if elapsed := time.Since(begin); elapsed > 5*time.Second {
		t.Fatal(elapsed)
	}
}

func TestDisconnectLeavesTheCommandRunning(t *testing.T) {
	f := newCommandFixture(t)
	flag := filepath.Join(t.TempDir(), "flag")
	id, _, response := f.begin(object{"command": "sleep 0.3; echo text; echo done > " + flag})
	response.Body.Close()
	eventually(t, "the command finished", func() bool {
		_, status := f.call("GET", "/command/status/"+id, "")
		return strings.Contains(status, `"running":false,"exit_code":0`)
	})
	if _, err := os.Stat(flag); err != nil {
		t.Fatal(err)
	}
}

func TestPingsAreSentWhileACommandIsSilent(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": "sleep 3.2"})
	equal(t, 2, strings.Count(string(result.raw), `"type":"ping","text":"pong"`))
}

func TestBackgroundCommandAnswersAtOnceAndKeepsItsOutput(t *testing.T) {
	f := newCommandFixture(t)
	begin := time.Now()
	result := f.run(object{"command": "echo one; sleep 0.5; echo two >&2; exit 3", "background": true})
	equal(t, "execution_complete", result.last.Type)
	if time.Since(begin) > 400*time.Millisecond {
		t.Fatal("the answer waited")
	}
	text, cursor := "", "0"
	eventually(t, "all output", func() bool {
		response := f.do("GET", "/command/"+result.id+"/logs?cursor="+cursor, nil)
		page, _ := io.ReadAll(response.Body)
		text += string(page)
		cursor = response.Header.Get("EXECD-COMMANDS-TAIL-CURSOR")
		return text == "one\ntwo\n"
	})
	equal(t, "8", cursor)
	eventually(t, "the end", func() bool {
		_, status := f.call("GET", "/command/status/"+result.id, "")
		return strings.Contains(status, `"running":false,"exit_code":3`)
	})
	for path, expected := range map[string]int{"?cursor=99": 200, "?cursor=-1": 400, "?cursor=x": 200} {
		status, _ := f.call("GET", "/command/"+result.id+"/logs"+path, "")
		equal(t, expected, status)
	}
	foreground := f.run(object{"command": "true"})
	status, _ := f.call("GET", "/command/"+foreground.id+"/logs", "")
	equal(t, 400, status)
	status, body := f.call("GET", "/command/status/0123", "")
	equal(t, 404, status)
	equal(t, true, strings.Contains(body, `"code":"INVALID_REQUEST_BODY"`) && strings.Contains(body, "command not found: 0123"))
}

func TestBackgroundOutputStaysWhereItsStreamsAreOpenedAnew(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": "echo one; echo two >/dev/stderr; (echo three >/dev/stdout); echo four >/proc/$$/fd/1; echo five", "background": true})
	eventually(t, "the end", func() bool {
		_, status := f.call("GET", "/command/status/"+result.id, "")
		return strings.Contains(status, `"running":false`)
	})
	_, text := f.call("GET", "/command/"+result.id+"/logs", "")
	equal(t, "one\ntwo\nthree\nfour\nfive\n", text)
}

func TestOutputOfWhatABackgroundCommandLeavesIsKept(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": "(sleep 0.3; echo late) & echo early", "background": true})
	eventually(t, "the end", func() bool {
		_, status := f.call("GET", "/command/status/"+result.id, "")
		return strings.Contains(status, `"running":false`)
	})
	eventually(t, "the rest", func() bool {
		_, text := f.call("GET", "/command/"+result.id+"/logs", "")
		return text == "early\nlate\n"
	})
}

func TestTwoHundredParallelCommandsGetTheirOwnStatus(t *testing.T) {
	f := newCommandFixture(t)
	var group sync.WaitGroup
	for i := range 200 {
		group.Go(func() {
			result := f.run(object{"command": fmt.Sprintf("(sleep 0.01 &) ; echo %d; exit %d", i, i%100+1)})
			if result.last.Error == nil || result.last.Error.Evalue != strconv.Itoa(i%100+1) || strings.Join(result.stdout, "") != fmt.Sprintf("%d\n", i) {
				t.Errorf("%d: %+v", i, result.last)
			}
		})
	}
	group.Wait()
}

func TestCommandsBeyondTheLimitAreRefused(t *testing.T) {
	f := newCommandFixture(t)
	f.commands.slots = NewSlots(1)
	id, reader, _ := f.begin(object{"command": "sleep 60"})
	status, _ := f.call("POST", "/command", `{"command":"true"}`)
	equal(t, 503, status)
	f.call("DELETE", "/command?id="+id, "")
	_, _ = io.ReadAll(reader)
	eventually(t, "room for a command", func() bool {
		status, _ = f.call("POST", "/command", `{"command":"true"}`)
		return status == 200
	})
}

func TestIdentityOfACommand(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	f := newCommandFixture(t)
	result := f.run(object{"argv": []string{"id"}, "uid": 12345})
	equal(t, []string{"uid=12345 gid=12345 groups=12345\n"}, result.stdout)
	result = f.run(object{"argv": []string{"id", "-u"}, "uid": 65534, "gid": 7})
	equal(t, []string{"65534\n"}, result.stdout)
}

func TestChildrenStartClean(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{"command": `ls -l /proc/self/fd | grep -c pipe; readlink /proc/self/fd/0; grep -E 'SigIgn|SigBlk' /proc/self/status; ps -o pgid=,sid= $$ | tr -s ' '`})
	equal(t, "2\n", result.stdout[0])
	equal(t, "/dev/null\n", result.stdout[1])
	equal(t, "SigBlk:\t0000000000000000\n", result.stdout[2])
	equal(t, "SigIgn:\t0000000000000000\n", result.stdout[3])
	ids := strings.Fields(result.stdout[4])
	equal(t, ids[0], ids[1])
}

func TestChildrenGoBeforeTheDaemonWhenMemoryRunsOut(t *testing.T) {
	f := newCommandFixture(t)
	result := f.run(object{
		"command": `until grep -qx 500 /proc/$$/oom_score_adj; do :; done; cat /proc/self/oom_score_adj`,
		"timeout": 5000,
	})
	equal(t, []string{"500\n"}, result.stdout)
}

func TestAnswerWithoutItsTerminalEventIsAborted(t *testing.T) {
	f := newCommandFixture(t)
	for name, request := range map[string]object{
		"success":         {"command": "true"},
		"failure":         {"command": "exit 3"},
		"missing program": {"argv": []string{"/nowhere"}},
		"background":      {"command": "true", "background": true},
	} {
		body, err := json.Marshal(request)
		equal(t, nil, err)
		abortedOnlyIfBroken(t, name, func(w http.ResponseWriter) {
			f.commands.run(w, httptest.NewRequest("POST", "/command", bytes.NewReader(body)))
		})
	}
}

func TestFinishedRecordsAreBounded(t *testing.T) {
	records := NewRecords()
	for range finishedLimit + 100 {
		r := &record{id: newCommandID(), done: make(chan struct{})}
		records.add(r)
		records.finish(r, outcome{})
	}
	equal(t, finishedLimit, len(records.byID))
}

func FuzzSplitterLosesNothing(f *testing.F) {
	f.Add([]byte("a\r\nb\rc\n"), 3)
	f.Fuzz(func(t *testing.T, data []byte, chunk int) {
		var joined []byte
		lines := lineSplitter{emit: func(text []byte) {
			if len(text) == 0 || len(text) > maxText {
				t.Fatal("a text of a wrong length")
			}
			joined = append(joined, text...)
		}}
		chunk = max(1, min(chunk, len(data)))
		for rest := data; len(rest) > 0; {
			n := min(chunk, len(rest))
			lines.feed(rest[:n])
			rest = rest[n:]
		}
		lines.flush()
		equal(t, string(data), string(joined))
	})
}

func FuzzQuotedTextIsAsciiJSON(f *testing.F) {
	f.Add("a\"\\\x00\x7f\u2028😀\xff")
	f.Fuzz(func(t *testing.T, text string) {
		quoted := appendQuoted(nil, text)
		var back string
		if err := json.Unmarshal(quoted, &back); err != nil {
			t.Fatal(err)
		}
		equal(t, string([]rune(text)), back)
		for _, c := range quoted {
			if c < ' ' || c > '~' {
				t.Fatal("not printable ASCII")
			}
		}
	})
}

func TestFinishedCommandsAreForgottenAfterADayWithinTheHour(t *testing.T) {
	f := newCommandFixture(t)
	records := f.commands.records
	var ids []string
	for _, command := range []string{"true", "true", "sleep 60"} {
		ids = append(ids, f.run(object{"command": command, "background": true}).id)
	}
	old, young, running := records.get(ids[0]), records.get(ids[1]), records.get(ids[2])
	t.Cleanup(func() { running.process.SignalGroup(syscall.SIGKILL) })
	<-old.done
	<-young.done
	age := func(r *record, by time.Duration) { // as the table has them: the one that finished first comes first
		r.started, r.finished = r.started.Add(-by), r.finished.Add(-by)
	}
	eventually(t, "both are in the table of finished ones", func() bool {
		records.mutex.Lock()
		defer records.mutex.Unlock()
		return len(records.ended) == 2
	})
	records.ended = []*record{old, young}
	age(old, recordAge+time.Minute)
	age(young, recordAge-time.Minute)
	running.started = running.started.Add(-2 * recordAge)
	for _, c := range []struct {
		swept time.Duration // how long ago
		old   int
	}{{recordSweep - time.Minute, 200}, {recordSweep + time.Minute, 404}} {
		records.lastScan = time.Now().Add(-c.swept)
		for i, expected := range []int{c.old, 200, 200} {
			for _, path := range []string{"/command/status/" + ids[i], "/command/" + ids[i] + "/logs"} {
				status, _ := f.call("GET", path, "")
				equal(t, fmt.Sprint(path, expected), fmt.Sprint(path, status))
			}
		}
	}
	equal(t, 0, old.output.files())
}

func TestTextsOfARecordEndWithAWholeCharacter(t *testing.T) {
	f := newCommandFixture(t)
	status := func(id string) (found commandStatus) {
		_, body := f.call("GET", "/command/status/"+id, "")
		if err := json.Unmarshal([]byte(body), &found); err != nil {
			t.Fatal(err)
		}
		return found
	}
	for shift := range 4 {
		text := ": " + strings.Repeat("x", shift) + strings.Repeat("\U0001f600", recordTextLimit/4)
		for _, request := range []object{{"command": text}, {"argv": []string{"true", text}}, {"argv": []string{"/" + text}}} {
			result := f.run(request)
			rec := status(result.id)
			for _, got := range []string{rec.Content, rec.Error} {
				if strings.ContainsRune(got, utf8.RuneError) || len(got) > recordTextLimit {
					t.Errorf("%d bytes, the end is %q", len(got), got[max(0, len(got)-9):])
				}
			}
			equal(t, true, len(rec.Content) > recordTextLimit-4)
			if result.last.Error != nil {
				equal(t, result.last.Error.Evalue, rec.Error)
				equal(t, true, strings.HasSuffix(rec.Error, "file name too long"))
			}
		}
	}
	result := f.run(object{"argv": []string{strings.Repeat("\u20ac", 1<<20)}})
	for line := range bytes.Lines(result.raw) {
		equal(t, true, len(line) < 1<<20)
	}
	equal(t, true, len(status(result.id).Error) <= recordTextLimit)
}

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

type sessionFixture struct {
	*client
	launcher *Launcher
	sessions *Sessions
	envFile  string
}

func newSessionFixture(t *testing.T) *sessionFixture {
	t.Helper()
	launcher, envFile := testLauncher(t)
	sessions := NewSessions(launcher)
	interrupt := routeTo{"DELETE", "/command", always(func(w http.ResponseWriter, r *http.Request) {
		if sessions.interrupt(r.URL.Query().Get("id")) {
			writeEmpty(w)
			return
		}
		notFound(w)
	})}
	return &sessionFixture{newClient(t, handle(append(sessions.routes(), interrupt)...)), launcher, sessions, envFile}
}

// refused is the message of an answer that is none of success.
func (f *sessionFixture) refused(path, body string) string {
	f.t.Helper()
	status, answer := f.call("POST", path, body)
	var problem struct{ Message string }
	if err := json.Unmarshal([]byte(answer), &problem); status < 400 || err != nil {
		f.t.Fatal(status, answer)
	}
	return problem.Message
}

func TestSessionKeepsEverythingItsShellHasExactly(t *testing.T) {
	f := newSessionFixture(t)
	session := f.newSession("{}")
	awkward := "  lead\ttab 'single' \"double\" $HOME `x` \\ \u00e9 end=  "
	first := f.in(session, `plain=one; export EXPORTED=$'two\nlines\n\n'; awkward=`+shellQuote(awkward)+`
raw=$'\377\001\033'; declare -a list=([2]=c [5]='f g'); declare -A map=([k]=v ['a b']=$'\n'); declare -i number=7
declare -r fixed=stone; nothing=; export -n nothing
greet() { echo "hello $1"; case $1 in a) echo A;; esac; }; export -f greet
alias ll='echo LL'; set -o pipefail; shopt -s extglob nullglob; umask 027; cd /usr`)
	equal(t, "execution_complete", first.last.Type)
	second := f.in(session, `echo "$plain|$number|$fixed|${nothing-unset}|${#list[@]} ${list[5]}|${map['a b']@Q}${map[k]}"
printf %s "$EXPORTED" | od -An -c | tr -d ' \n'; echo; printf %s "$raw" | od -An -tx1 | tr -d ' \n'; echo
[ "$awkward" = `+shellQuote(awkward)+` ] && echo same; greet a; bash -c 'greet b'; ll
umask; pwd; shopt -q extglob && shopt -q nullglob && [ -o pipefail ] && echo options; number+=1; echo $number
(fixed=sand) 2>/dev/null || echo refused; echo "$fixed"`)
	equal(t, []string{
		`one|7|stone||2 f g|$'\n'v`, `two\nlines\n\n`, "ff011b", "same", "hello a", "A", "hello b", "LL",
		"0027", "/usr", "options", "8", "refused", "stone",
	}, second.stdout)
	third := f.in(session, `fixed=sand; echo not reached`)
	equal(t, "error", third.last.Type)
	equal(t, []string{"stone /usr"}, f.in(session, `echo "$fixed $PWD"`).stdout)
}

func TestSessionRunThatEndsItsShellLeavesTheStateAlone(t *testing.T) {
	f := newSessionFixture(t)
	session := f.newSession("")
	f.in(session, "x=kept; cd /usr")
	for _, c := range []struct{ command, value string }{
		{"x=lost; cd /; exit 3", "3"}, {"x=lost; exec sh -c 'exit 4'", "4"}, {"x=lost; set -e; false; true", "1"},
		{"x=lost; kill -KILL $$", "-1"},
	} {
		result := f.in(session, c.command)
		equal(t, "CommandExecError", result.last.Error.Ename)
		equal(t, c.value, result.last.Error.Evalue)
		equal(t, []string{"kept /usr"}, f.in(session, "echo $x $PWD").stdout)
	}
	result := f.in(session, "x=changed; false")
	equal(t, "1", result.last.Error.Evalue)
	equal(t, []string{"changed"}, f.in(session, "echo $x").stdout)
}

func TestSessionStateIsNeitherInItsOutputNorForged(t *testing.T) {
	f := newSessionFixture(t)
	session := f.newSession("{}")
	f.in(session, "x=true")
	result := f.in(session, `printf '/forged\0set -o nounset\0\0\0\0\0x\0forged\0declare -- x=forged\n\0end\0'; ls -l /proc/self/fd | wc -l
for fd in 3 4 9 10; do [ -e /proc/self/fd/$fd ] && echo "open $fd"; done; [ -z "${__execd+set}" ] || echo visible
env | grep -c __execd; tr '\0' '\n' </proc/$$/cmdline | grep -c x=true`)
	equal(t, false, strings.Contains(strings.Join(result.stdout, "\n"), "open "))
	equal(t, false, strings.Contains(strings.Join(result.stdout, "\n"), "visible"))
	equal(t, []string{"0", "0"}, result.stdout[len(result.stdout)-2:])
	equal(t, []string{"true /"}, f.in(session, "echo $x $PWD").stdout)
}

func TestSessionStateGoesIntoNoDescriptorThatACommandUses(t *testing.T) {
	f := newSessionFixture(t)
	session, file := f.newSession("{}"), t.TempDir()+"/lock"
	f.in(session, "x=secret; for fd in {3..251}; do echo junk >&$fd; done 2>/dev/null; exec 10>"+file+" 250>&1 251>&1; echo mine >&10")
	content, _ := os.ReadFile(file)
	equal(t, "mine", strings.TrimSpace(string(content)))
	equal(t, []string{"secret /"}, f.in(session, "echo $x $PWD").stdout)
}

func TestSessionSurvivesWhateverIsRedefined(t *testing.T) {
	f := newSessionFixture(t)
	session := f.newSession("{}")
	f.in(session, `declare() { echo fake; }; printf() { echo fake; }; mapfile() { echo fake; }; exit() { echo fake; }
alias builtin=false declare=false printf=false exit=true; set -x; set -f; IFS=abcdefghijklmnop; trap 'echo trapped' DEBUG; set -u; export PS4=`)
	session2 := f.in(session, `x=5`)
	equal(t, "execution_complete", session2.last.Type)
	equal(t, true, strings.Contains(strings.Join(f.in(session, "echo \"<$x>\"").stdout, "\n"), "<5>"))
}

func TestSessionMayHaveAFunctionOrAnAliasOfAnyName(t *testing.T) {
	f := newSessionFixture(t)
	for _, c := range []struct{ define, use, expected string }{
		{"builtin() { echo mine; }", "builtin", "mine"},
		{"builtin() { echo mine; }; declare() { echo other; }; export() { :; }; unset() { :; }; trap() { :; }", "builtin; declare", "mine other"},
		{"exit() { echo left; }; eval() { echo said; }; builtin() { echo mine; }", "exit; eval; builtin", "left said mine"},
		{"alias '{=echo brace' if='echo if'", "{ on\nif on", "brace on if on"},
		{"builtin() { echo mine; }; alias builtin='echo alias'", "builtin x; \\builtin", "alias x mine"},
		{"builtin() { echo mine; }; shopt -u expand_aliases; alias builtin=false '{=false'", "{ builtin; }", "mine"},
		{"builtin() { echo mine; }; POSIXLY_CORRECT=here", "builtin; echo $POSIXLY_CORRECT; [ -o posix ] && echo posix", "mine here posix"},
		{"builtin() { echo mine; }", "set -E; trap 'echo trapped' ERR EXIT", "trapped"},
	} {
		session := f.newSession("{}")
		f.in(session, "x=0; set -o pipefail; shopt -s nullglob; "+c.define)
		for n := range 3 {
			run := f.in(session, "x=$((x+1)); [ -o pipefail ] && shopt -q nullglob && echo $x\n"+c.use)
			equal(t, fmt.Sprint(n+1, " ", c.expected), strings.Join(run.stdout, " "))
			equal(t, "execution_complete", run.last.Type)
		}
		equal(t, "7", f.in(session, "sh -c 'exit 7'").last.Error.Evalue)
	}
}

func TestSessionMergesStderrAndSendsBareLines(t *testing.T) {
	f := newSessionFixture(t)
	session := f.newSession("null")
	result := f.in(session, `echo one; echo; echo two >&2; printf tail`)
	equal(t, []string{"one", "\n", "two", "tail"}, result.stdout)
	equal(t, 0, len(result.stderr))
	equal(t, session, result.id)
	failed := f.in(session, `sh -c 'echo oops >&2; exit 7'`)
	equal(t, []string{"oops"}, failed.stdout)
	equal(t, []string{"exit status 7"}, failed.last.Error.Traceback)
}

func TestSessionTakesTheEnvironmentOfNowUnlessItChangedIt(t *testing.T) {
	f := newSessionFixture(t)
	file := t.TempDir() + "/env"
	f.launcher.env.Bind(map[string]string{"EXECD_ENVS": file})
	session := f.newSession("{}")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("A=1\nB=1\nC=1\n")
	f.in(session, "export B=mine; unset C")
	write("A=2\nB=2\nC=2\n")
	equal(t, []string{"2 mine none"}, f.in(session, `echo "$A $B ${C-none}"`).stdout)
	f.in(session, "export -n A; cd /usr; export -n OLDPWD")
	equal(t, []string{"2 / none none"}, f.in(session, `echo "$A $OLDPWD $(sh -c 'echo ${A-none} ${OLDPWD-none}')"`).stdout)
}

func TestSessionDirectory(t *testing.T) {
	f := newSessionFixture(t)
	directory := t.TempDir() + "/made/here"
	session := f.newSession(`{"cwd":"` + directory + `"}`)
	equal(t, []string{directory}, f.in(session, "pwd").stdout)
	other := t.TempDir()
	equal(t, []string{other}, f.in(session, "pwd; exit 0", object{"cwd": other}).stdout)
	equal(t, []string{other}, f.in(session, "pwd; mkdir sub; cd sub").stdout)
	equal(t, []string{other + "/sub"}, f.in(session, "pwd; rmdir $PWD").stdout)
	status, _ := f.call("POST", "/session/"+session+"/run", `{"command":"pwd"}`)
	equal(t, 400, status)
	equal(t, []string{"/"}, f.in(session, "pwd", object{"cwd": "/"}).stdout)
}

func TestSessionRunsAreSerialAndTheTimeLimitEndsTheWholeGroup(t *testing.T) {
	f := newSessionFixture(t)
	session := f.newSession("{}")
	f.in(session, "n=0")
	var runs sync.WaitGroup
	for range 8 {
		runs.Go(func() { f.in(session, `m=$n; sleep 0.02; n=$((m+1))`) })
	}
	runs.Wait()
	equal(t, []string{"8"}, f.in(session, "echo $n").stdout)
	began := time.Now()
	result := f.in(session, "n=lost; sleep 60 & sleep 60", object{"timeout": 200})
	equal(t, []string{"timeout after 200ms"}, result.last.Error.Traceback)
	equal(t, "-1", result.last.Error.Evalue)
	equal(t, true, time.Since(began) < 20*time.Second)
	equal(t, []string{"8"}, f.in(session, "echo $n").stdout)
}

func TestSessionInterruptDeleteAndDeparture(t *testing.T) {
	f := newSessionFixture(t)
	session := f.newSession("{}")
	begin := func() *http.Response {
		response := f.do("POST", "/session/"+session+"/run", strings.NewReader(`{"command":"sleep 60"}`))
		if _, err := response.Body.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		return response
	}
	response := begin()
	status, _ := f.call("DELETE", "/command?id="+session, "")
	equal(t, 200, status)
	rest, _ := io.ReadAll(response.Body)
	equal(t, true, strings.Contains(string(rest), `"signal: terminated"`))
	status, _ = f.call("DELETE", "/command?id="+session, "")
	equal(t, 200, status)

	begin().Body.Close()
	equal(t, []string{"next"}, f.in(session, "echo next").stdout)

	response = begin()
	status, _ = f.call("DELETE", "/session/"+session, "")
	equal(t, 200, status)
	rest, _ = io.ReadAll(response.Body)
	equal(t, true, strings.Contains(string(rest), `"signal: killed"`))
	status, answer := f.call("DELETE", "/session/"+session, "")
	equal(t, 404, status)
	equal(t, true, strings.Contains(answer, "CONTEXT_NOT_FOUND"))
	status, answer = f.call("POST", "/session/"+session+"/run", `{"command":"true"}`)
	equal(t, 500, status)
	equal(t, true, strings.Contains(answer, "context not found"))
}

func TestSessionRefusesWhatIsNoRun(t *testing.T) {
	f := newSessionFixture(t)
	session := f.newSession("{}")
	for _, body := range []string{"", "{", `{}`, `{"command":null}`, `{"command":"  "}`, `{"command":"a\u0000"}`,
		`{"command":"true","timeout":-1}`, `{"command":"true","cwd":"/no/such"}`, `{"command":5}`} {
		status, _ := f.call("POST", "/session/"+session+"/run", body)
		equal(t, 400, status)
	}
	equal(t, 0, f.launcher.slots.inUse())
}

func TestSessionStateThatIsTooLargeIsNotKeptAndTheUserIsTold(t *testing.T) {
	f := newSessionFixture(t)
	session := f.newSession("{}")
	f.in(session, "x=kept")
	result := f.in(session, `x=lost; y=$(head -c 5000000 /dev/zero | tr '\0' y)`)
	equal(t, true, strings.Contains(strings.Join(result.stdout, ""), "was not kept"))
	equal(t, []string{"kept"}, f.in(session, "echo $x").stdout)
}

func TestSessionWithoutBashKeepsExportedVariablesAndTheDirectory(t *testing.T) {
	f := newSessionFixture(t)
	directory := withoutBash(t.TempDir())
	f.launcher.env.Bind(map[string]string{"PATH": directory})
	session := f.newSession("{}")
	result := f.in(session, "export A='b c\n'; plain=1; cd /usr; unset HOME")
	equal(t, "execution_complete", result.last.Type)
	equal(t, []string{"b c", "||/usr|none"}, f.in(session, `echo "$A||$PWD|${HOME-none}"`).stdout)
	equal(t, "3", f.in(session, "export A=lost; exit 3").last.Error.Evalue)
	equal(t, []string{"b c", "\n"}, f.in(session, `echo "$A"`).stdout)
	f.in(session, "alias env=false '{=false'; printf() { :; }; A=kept")
	equal(t, []string{"kept"}, f.in(session, `echo "$A"`).stdout)
}

func TestThousandsOfSessionsEndInALimit(t *testing.T) {
	f := newSessionFixture(t)
	ids := make([]string, 0, sessionLimit)
	for range sessionLimit {
		ids = append(ids, f.newSession("{}"))
	}
	response := f.do("POST", "/session", strings.NewReader("{}"))
	equal(t, 503, response.StatusCode)
	equal(t, "1", response.Header.Get("Retry-After"))
	status, _ := f.call("GET", "/ping", "")
	equal(t, 200, status)
	status, _ = f.call("DELETE", "/session/"+ids[0], "")
	equal(t, 200, status)
	f.newSession("{}")
}

func TestASessionThatNobodyUsedForADayMakesRoom(t *testing.T) {
	f := newSessionFixture(t)
	sessions := f.sessions
	waited, idle := f.newSession("{}"), f.newSession("{}")
	for range sessionLimit - 2 {
		sessions.add(newSession("/"))
	}
	sessions.find(idle).used = time.Now().Add(time.Minute - sessionIdle)
	sessions.find(waited).used = time.Now().Add(-time.Minute - sessionIdle)
	sessions.find(waited).waiting = 1
	status, _ := f.call("POST", "/session", "{}")
	equal(t, 503, status)
	sessions.find(idle).used = time.Now().Add(-time.Minute - sessionIdle)
	f.newSession("{}")
	equal(t, "context not found: "+idle, f.refused("/session/"+idle+"/run", `{"command":"true"}`))
	sessions.find(waited).waiting = 0
	equal(t, "execution_complete", f.in(waited, "true").last.Type)
	status, _ = f.call("POST", "/session", "{}")
	equal(t, 503, status) // it was used
}

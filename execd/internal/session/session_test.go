package session

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

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

type fixture struct {
	*testkit.Client
	launcher *process.Launcher
	sessions *Sessions
	envFile  string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	launcher, envFile := testhost.Launcher(t)
	sessions := New(launcher)
	interrupt := httpx.Route{Method: "DELETE", Path: "/command", Handler: httpx.Always(func(w http.ResponseWriter, r *http.Request) {
		if sessions.Interrupt(r.URL.Query().Get("id")) {
			httpx.WriteEmpty(w)
			return
		}
		httpx.NotFound(w)
	})}
	return &fixture{testkit.NewClient(t, testhost.Handle(append(sessions.Routes(), interrupt)...)), launcher, sessions, envFile}
}

// refused sends a request, which must fail, and returns the message of the answer.
func (f *fixture) refused(path, body string) string {
	f.T.Helper()
	status, answer := f.Call("POST", path, body)
	var problem struct{ Message string }
	if err := json.Unmarshal([]byte(answer), &problem); status < 400 || err != nil {
		f.T.Fatal(status, answer)
	}
	return problem.Message
}

func TestSessionKeepsEverythingItsShellHasExactly(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	awkward := "  lead\ttab 'single' \"double\" $HOME `x` \\ \u00e9 end=  "
	first := f.In(session, `plain=one; export EXPORTED=$'two\nlines\n\n'; awkward=`+process.ShellQuote(awkward)+`
raw=$'\377\001\033'; declare -a list=([2]=c [5]='f g'); declare -A map=([k]=v ['a b']=$'\n'); declare -i number=7
declare -r fixed=stone; nothing=; export -n nothing
greet() { echo "hello $1"; case $1 in a) echo A;; esac; }; export -f greet
alias ll='echo LL'; set -o pipefail; shopt -s extglob nullglob; umask 027; cd /usr`)
	testkit.Equal(t, "execution_complete", first.Last.Type)
	second := f.In(session, `echo "$plain|$number|$fixed|${nothing-unset}|${#list[@]} ${list[5]}|${map['a b']@Q}${map[k]}"
printf %s "$EXPORTED" | od -An -c | tr -d ' \n'; echo; printf %s "$raw" | od -An -tx1 | tr -d ' \n'; echo
[ "$awkward" = `+process.ShellQuote(awkward)+` ] && echo same; greet a; bash -c 'greet b'; ll
umask; pwd; shopt -q extglob && shopt -q nullglob && [ -o pipefail ] && echo options; number+=1; echo $number
(fixed=sand) 2>/dev/null || echo refused; echo "$fixed"`)
	testkit.Equal(t, []string{
		`one|7|stone||2 f g|$'\n'v`, `two\nlines\n\n`, "ff011b", "same", "hello a", "A", "hello b", "LL",
		"0027", "/usr", "options", "8", "refused", "stone",
	}, second.Stdout)
	third := f.In(session, `fixed=sand; echo not reached`)
	testkit.Equal(t, "error", third.Last.Type)
	testkit.Equal(t, []string{"stone /usr"}, f.In(session, `echo "$fixed $PWD"`).Stdout)
}

func TestSessionRunThatEndsItsShellLeavesTheStateAlone(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("")
	f.In(session, "x=kept; cd /usr")
	for _, c := range []struct{ command, value string }{
		{"x=lost; cd /; exit 3", "3"}, {"x=lost; exec sh -c 'exit 4'", "4"}, {"x=lost; set -e; false; true", "1"},
		{"x=lost; kill -KILL $$", "-1"},
	} {
		result := f.In(session, c.command)
		testkit.Equal(t, "CommandExecError", result.Last.Error.Ename)
		testkit.Equal(t, c.value, result.Last.Error.Evalue)
		testkit.Equal(t, []string{"kept /usr"}, f.In(session, "echo $x $PWD").Stdout)
	}
	result := f.In(session, "x=changed; false")
	testkit.Equal(t, "1", result.Last.Error.Evalue)
	testkit.Equal(t, []string{"changed"}, f.In(session, "echo $x").Stdout)
}

func TestSessionStateIsNeitherInItsOutputNorForged(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	f.In(session, "x=true")
	result := f.In(session, `printf '/forged\0set -o nounset\0\0\0\0\0x\0forged\0declare -- x=forged\n\0end\0'; ls -l /proc/self/fd | wc -l
for fd in 3 4 9 10; do [ -e /proc/self/fd/$fd ] && echo "open $fd"; done; [ -z "${__execd+set}" ] || echo visible
env | grep -c __execd; tr '\0' '\n' </proc/$$/cmdline | grep -c x=true`)
	testkit.Equal(t, false, strings.Contains(strings.Join(result.Stdout, "\n"), "open "))
	testkit.Equal(t, false, strings.Contains(strings.Join(result.Stdout, "\n"), "visible"))
	testkit.Equal(t, []string{"0", "0"}, result.Stdout[len(result.Stdout)-2:])
	testkit.Equal(t, []string{"true /"}, f.In(session, "echo $x $PWD").Stdout)
}

func TestSessionStateGoesIntoNoDescriptorThatACommandUses(t *testing.T) {
	f := newFixture(t)
	session, file := f.NewSession("{}"), t.TempDir()+"/lock"
	f.In(session, "x=secret; for fd in {3..251}; do echo junk >&$fd; done 2>/dev/null; exec 10>"+file+" 250>&1 251>&1; echo mine >&10")
	content, _ := os.ReadFile(file)
	testkit.Equal(t, "mine", strings.TrimSpace(string(content)))
	testkit.Equal(t, []string{"secret /"}, f.In(session, "echo $x $PWD").Stdout)
}

func TestSessionSurvivesWhateverIsRedefined(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	f.In(session, `declare() { echo fake; }; printf() { echo fake; }; mapfile() { echo fake; }; exit() { echo fake; }
alias builtin=false declare=false printf=false exit=true; set -x; set -f; IFS=abcdefghijklmnop; trap 'echo trapped' DEBUG; set -u; export PS4=`)
	session2 := f.In(session, `x=5`)
	testkit.Equal(t, "execution_complete", session2.Last.Type)
	testkit.Equal(t, true, strings.Contains(strings.Join(f.In(session, "echo \"<$x>\"").Stdout, "\n"), "<5>"))
}

func TestSessionMayHaveAFunctionOrAnAliasOfAnyName(t *testing.T) {
	f := newFixture(t)
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
		session := f.NewSession("{}")
		f.In(session, "x=0; set -o pipefail; shopt -s nullglob; "+c.define)
		for n := range 3 {
			run := f.In(session, "x=$((x+1)); [ -o pipefail ] && shopt -q nullglob && echo $x\n"+c.use)
			testkit.Equal(t, fmt.Sprint(n+1, " ", c.expected), strings.Join(run.Stdout, " "))
			testkit.Equal(t, "execution_complete", run.Last.Type)
		}
		testkit.Equal(t, "7", f.In(session, "sh -c 'exit 7'").Last.Error.Evalue)
	}
}

func TestSessionMergesStderrAndSendsBareLines(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("null")
	result := f.In(session, `echo one; echo; echo two >&2; printf tail`)
	testkit.Equal(t, []string{"one", "\n", "two", "tail"}, result.Stdout)
	testkit.Equal(t, 0, len(result.Stderr))
	testkit.Equal(t, session, result.ID)
	failed := f.In(session, `sh -c 'echo oops >&2; exit 7'`)
	testkit.Equal(t, []string{"oops"}, failed.Stdout)
	testkit.Equal(t, []string{"exit status 7"}, failed.Last.Error.Traceback)
}

func TestSessionTakesTheEnvironmentOfNowUnlessItChangedIt(t *testing.T) {
	f := newFixture(t)
	file := t.TempDir() + "/env"
	f.launcher.Env.Bind(map[string]string{"EXECD_ENVS": file})
	session := f.NewSession("{}")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("A=1\nB=1\nC=1\n")
	f.In(session, "export B=mine; unset C")
	write("A=2\nB=2\nC=2\n")
	testkit.Equal(t, []string{"2 mine none"}, f.In(session, `echo "$A $B ${C-none}"`).Stdout)
	f.In(session, "export -n A; cd /usr; export -n OLDPWD")
	testkit.Equal(t, []string{"2 / none none"}, f.In(session, `echo "$A $OLDPWD $(sh -c 'echo ${A-none} ${OLDPWD-none}')"`).Stdout)
}

func TestSessionDirectory(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir() + "/made/here"
	session := f.NewSession(`{"cwd":"` + directory + `"}`)
	testkit.Equal(t, []string{directory}, f.In(session, "pwd").Stdout)
	other := t.TempDir()
	testkit.Equal(t, []string{other}, f.In(session, "pwd; exit 0", testkit.Object{"cwd": other}).Stdout)
	testkit.Equal(t, []string{other}, f.In(session, "pwd; mkdir sub; cd sub").Stdout)
	testkit.Equal(t, []string{other + "/sub"}, f.In(session, "pwd; rmdir $PWD").Stdout)
	status, _ := f.Call("POST", "/session/"+session+"/run", `{"command":"pwd"}`)
	testkit.Equal(t, 400, status)
	testkit.Equal(t, []string{"/"}, f.In(session, "pwd", testkit.Object{"cwd": "/"}).Stdout)
}

func TestSessionRunsAreSerialAndTheTimeLimitEndsTheWholeGroup(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	f.In(session, "n=0")
	var runs sync.WaitGroup
	for range 8 {
		runs.Go(func() { f.In(session, `m=$n; sleep 0.02; n=$((m+1))`) })
	}
	runs.Wait()
	testkit.Equal(t, []string{"8"}, f.In(session, "echo $n").Stdout)
	began := time.Now()
	result := f.In(session, "n=lost; sleep 60 & sleep 60", testkit.Object{"timeout": 200})
	testkit.Equal(t, []string{"timeout after 200ms"}, result.Last.Error.Traceback)
	testkit.Equal(t, "-1", result.Last.Error.Evalue)
	testkit.Equal(t, true, time.Since(began) < 20*time.Second)
	testkit.Equal(t, []string{"8"}, f.In(session, "echo $n").Stdout)
}

func TestSessionInterruptDeleteAndDeparture(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	begin := func() *http.Response {
		response := f.Do("POST", "/session/"+session+"/run", strings.NewReader(`{"command":"sleep 60"}`))
		if _, err := response.Body.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		return response
	}
	response := begin()
	status, _ := f.Call("DELETE", "/command?id="+session, "")
	testkit.Equal(t, 200, status)
	rest, _ := io.ReadAll(response.Body)
	testkit.Equal(t, true, strings.Contains(string(rest), `"signal: terminated"`))
	status, _ = f.Call("DELETE", "/command?id="+session, "")
	testkit.Equal(t, 200, status)

	begin().Body.Close()
	testkit.Equal(t, []string{"next"}, f.In(session, "echo next").Stdout)

	response = begin()
	status, _ = f.Call("DELETE", "/session/"+session, "")
	testkit.Equal(t, 200, status)
	rest, _ = io.ReadAll(response.Body)
	testkit.Equal(t, true, strings.Contains(string(rest), `"signal: killed"`))
	status, answer := f.Call("DELETE", "/session/"+session, "")
	testkit.Equal(t, 404, status)
	testkit.Equal(t, true, strings.Contains(answer, "CONTEXT_NOT_FOUND"))
	status, answer = f.Call("POST", "/session/"+session+"/run", `{"command":"true"}`)
	testkit.Equal(t, 500, status)
	testkit.Equal(t, true, strings.Contains(answer, "context not found"))
}

func TestSessionRefusesWhatIsNoRun(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	for _, body := range []string{"", "{", `{}`, `{"command":null}`, `{"command":"  "}`, `{"command":"a\u0000"}`,
		`{"command":"true","timeout":-1}`, `{"command":"true","cwd":"/no/such"}`, `{"command":5}`} {
		status, _ := f.Call("POST", "/session/"+session+"/run", body)
		testkit.Equal(t, 400, status)
	}
	testkit.Equal(t, 0, f.launcher.Slots.InUse())
}

func TestSessionStateThatIsTooLargeIsNotKeptAndTheUserIsTold(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	f.In(session, "x=kept")
	result := f.In(session, `x=lost; y=$(head -c 5000000 /dev/zero | tr '\0' y)`)
	testkit.Equal(t, true, strings.Contains(strings.Join(result.Stdout, ""), "was not kept"))
	testkit.Equal(t, []string{"kept"}, f.In(session, "echo $x").Stdout)
}

func TestSessionWithoutBashKeepsExportedVariablesAndTheDirectory(t *testing.T) {
	f := newFixture(t)
	directory := testhost.WithoutBash(t.TempDir())
	f.launcher.Env.Bind(map[string]string{"PATH": directory})
	session := f.NewSession("{}")
	result := f.In(session, "export A='b c\n'; plain=1; cd /usr; unset HOME")
	testkit.Equal(t, "execution_complete", result.Last.Type)
	testkit.Equal(t, []string{"b c", "||/usr|none"}, f.In(session, `echo "$A||$PWD|${HOME-none}"`).Stdout)
	testkit.Equal(t, "3", f.In(session, "export A=lost; exit 3").Last.Error.Evalue)
	testkit.Equal(t, []string{"b c", "\n"}, f.In(session, `echo "$A"`).Stdout)
	f.In(session, "alias env=false '{=false'; printf() { :; }; A=kept")
	testkit.Equal(t, []string{"kept"}, f.In(session, `echo "$A"`).Stdout)
}

func TestThousandsOfSessionsEndInALimit(t *testing.T) {
	f := newFixture(t)
	ids := make([]string, 0, limit)
	for range limit {
		ids = append(ids, f.NewSession("{}"))
	}
	response := f.Do("POST", "/session", strings.NewReader("{}"))
	testkit.Equal(t, 503, response.StatusCode)
	testkit.Equal(t, "1", response.Header.Get("Retry-After"))
	status, _ := f.Call("GET", "/ping", "")
	testkit.Equal(t, 200, status)
	status, _ = f.Call("DELETE", "/session/"+ids[0], "")
	testkit.Equal(t, 200, status)
	f.NewSession("{}")
}

func TestASessionUnusedForADayMakesRoom(t *testing.T) {
	f := newFixture(t)
	sessions := f.sessions
	waited, idle := f.NewSession("{}"), f.NewSession("{}")
	for range limit - 2 {
		sessions.add(newSession("/"))
	}
	sessions.find(idle).used = time.Now().Add(time.Minute - idleLimit)
	sessions.find(waited).used = time.Now().Add(-time.Minute - idleLimit)
	sessions.find(waited).waiting = 1
	status, _ := f.Call("POST", "/session", "{}")
	testkit.Equal(t, 503, status)
	sessions.find(idle).used = time.Now().Add(-time.Minute - idleLimit)
	f.NewSession("{}")
	testkit.Equal(t, "context not found: "+idle, f.refused("/session/"+idle+"/run", `{"command":"true"}`))
	sessions.find(waited).waiting = 0
	testkit.Equal(t, "execution_complete", f.In(waited, "true").Last.Type)
	status, _ = f.Call("POST", "/session", "{}")
	testkit.Equal(t, 503, status) // no session is idle, because waited was used again
}

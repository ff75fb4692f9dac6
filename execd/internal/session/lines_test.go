package session

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

// messages returns the lines that a run printed, without the shell's remarks about the source of its text.
func messages(run testkit.Result) string {
	var lines []string
	from := strings.NewReplacer(": -c: ", ": ", ": eval: ", ": ", ": /proc/self/fd/3: ", ": ")
	for line := range strings.SplitSeq(strings.Join(run.Stdout, "\n"), "\n") {
		if line != "" {
			lines = append(lines, from.Replace(line))
		}
	}
	return strings.Join(lines, "\n")
}

// plain returns the output of a shell that executes a text without a session.
func (f *fixture) plain(shell, text string) string {
	f.T.Helper()
	command := "exec " + shell + " -c " + process.ShellQuote(text) + " " + strings.Fields(shell)[0] + " 2>&1"
	return messages(testkit.Result{Stdout: []string{testhost.Output(f.T, f.launcher, "sh", "-c", command)}})
}

// wordy are texts whose messages contain line numbers; the test replaces %d with a number.
var wordy = []string{
	"missing-%d",
	"# a comment\n\n\nmissing-%d $LINENO",
	"echo %d $LINENO",
	"echo \"%d\n$LINENO\n\" $LINENO",
	"cat <<END\n%d $LINENO\n$(missing)\nEND\nmissing",
	"f%d() {\n  missing\n  echo $LINENO\n}\nf%[1]d",
	"f%d () ( missing; echo $LINENO )\nf%[1]d",
	"trap 'echo failed %d at $LINENO' ERR\nfalse\n\ntrue\nfalse",
	"for x in 1 2; do\n  missing-%d\ndone; missing",
	"if true; then\n  missing-%d \\\n   two lines\n\n  missing\nfi",
	"(\n\n cd /missing-%d\n)",
	"echo $(missing-%d\n\nmissing)",
	"echo $((%d/0))\nmissing",
	"unset x%d; (echo ${x%[1]d?is not set})\nmissing",
	"alias a%d=missing\n\na%[1]d",
	". /missing-%d\nmissing",
	"printf 'missing-%d\\n\\necho $LINENO; missing' >$source; . $source; missing; echo $LINENO",
	"set -u; (echo $y%d)\nset +u; (missing)",
	"eval 'missing-%d\nmissing'; missing",
	"LINENO=%d; missing\nmissing",
	"case %d in\n*) missing;;\nesac",
	"x=$(\nmissing-%d\n)\ny=`\nmissing`",
}

// unfinished are ends of a text. For the incomplete ones bash reports a line number.
var unfinished = []string{"", "echo 'a\n\n", "if true; then\n\nfi", "cat <<END\n", "echo )\n", "f() {\nmissing", "echo ${a b}\nmissing"}

func drawnText(draw *rand.Rand) string {
	var parts []string
	for range 1 + draw.IntN(5) {
		parts = append(parts, fmt.Sprintf(wordy[draw.IntN(len(wordy))], draw.IntN(100)))
	}
	parts = append(parts, unfinished[draw.IntN(len(unfinished))])
	return strings.Join(parts, "\n")
}

// For every kept state the messages of a session contain the same line numbers as those of a shell without a session.
func TestSessionCountsTheLinesOfItsUser(t *testing.T) {
	f := newFixture(t)
	source := t.TempDir() + "/source"
	seed := rand.Uint64()
	t.Log("seed", seed)
	draw := rand.New(rand.NewPCG(seed, 0))
	for range 12 {
		session := f.NewSession("{}")
		for range 6 {
			text := "source=" + source + "\n" + drawnText(draw)
			testkit.Equal(t, f.plain("bash -O expand_aliases", text), messages(f.In(session, text)))
			f.In(session, "trap - ERR; unalias -a; set +u")
			f.In(session, fmt.Sprintf("kept%d='\n\n'; k%[1]d() {\n :\n}; export -f k%[1]d; shopt -s extglob", draw.IntN(1000)))
		}
	}
}

func TestSessionFunctionKeepsTheLinesOfItsRun(t *testing.T) {
	f := newFixture(t)
	session := f.NewSession("{}")
	f.In(session, "true\n\nfirst() {\n  missing\n  if true; then\n    echo $LINENO\n  fi\n  missing\n  cat <<END\n) () \n{ \n$LINENO\nEND\n}\n")
	for range 3 { // the numbers are the same in each run
		testkit.Equal(t, `environment: line 4: missing: command not found
6
environment: line 8: missing: command not found
) () 
{ 
9
bash: line 2: missing: command not found`, messages(f.In(session, "first\nmissing")))
	}
	// bash stores a function in a layout of its own. The numbers follow that layout, and are the same in each run.
	f.In(session, "\n\nsecond() { missing; missing; }\nfunction third\n{\n\n # a comment\n missing\n}\nbuiltin() { missing; }")
	once := messages(f.In(session, "second; third; builtin"))
	for range 3 {
		testkit.Equal(t, once, messages(f.In(session, "second; third; builtin")))
	}
}

func TestSessionWithoutBashCountsTheLinesOfItsUser(t *testing.T) {
	f := newFixture(t)
	directory := testhost.WithoutBash(t.TempDir())
	f.launcher.Env.Bind(map[string]string{"PATH": directory})
	session := f.NewSession("{}")
	for _, text := range []string{"missing", "true\n\nmissing", "f() {\n missing\n}\nf", "echo 'a\n'\nmissing"} {
		f.In(session, "export A='\n\n'")
		testkit.Equal(t, f.plain("sh", text), messages(f.In(session, text)))
	}
}

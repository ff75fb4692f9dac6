package session

// The state that a bash session keeps between its runs, and the shell program that carries it from run to run.
//
// Each run is a shell of its own. It reads the state and the command from one file in memory. When the command has
// ended, it writes the new state to a second file in memory. The state is never on disk, in the output, or in an
// argument list, because every user can read argument lists.
//
// Invariants
//   - Kept: variables of every kind with their attributes, functions, aliases, set -o, shopt, umask, working directory.
//     Not kept: jobs, descriptors, traps.
//   - A run whose command ends the shell (exit, exec, a signal, set -e) does not change the state.
//   - A variable that still has the value from the daemon or EXECD_ENVS is not kept, so that the next run gets the
//     value that is then current.
//   - The kept state is text for the user's own shell; no other process executes it. Its size is bounded and its form
//     is checked.
//   - Line numbers in messages and in LINENO count the user's lines, from 1 in each run. A function of an earlier run
//     keeps the numbers of the run that defined it.

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/sys"
)

// stateLimit bounds the kept state of one session, in bytes.
const stateLimit = 4 << 20

// bashDriver runs in the shell of a session. It reads the state and the command from descriptor 3, and writes the new
// state to descriptor 4. It is one compound command, so that aliases of the session cannot change how bash parses it.
//
// When a redirection replaces a descriptor during a command, bash saves the original descriptor above the one that
// replaces it: with 250 at 252, close-on-exec. If the redirection closed the descriptor instead, bash would save it at
// 10. Commands use 10 as a descriptor of their own, and the state would be written into the file that they opened
// there. So 250 and 251 stay open on /dev/null.
//
// The session can define a function with the name builtin. Only special builtins in POSIX mode precede functions. The
// options that POSIX mode changes are read before it is switched on.
const bashDriver = `{
exec 250<&3 3<&- 251>&4 4>&-; builtin mapfile -d '' -u 250 -t __execd; exec 250</dev/null
builtin eval "${__execd[0]}" 2>/dev/null 251>&250
builtin eval "${__execd[1]}" 251>&250
{ __execd=$?; if (
__execd_on=$SHELLOPTS:$BASHOPTS __execd_posix=${POSIXLY_CORRECT+on}
[[ $__execd_posix ]] || POSIXLY_CORRECT=
trap - DEBUG ERR RETURN; set +efuxv
if export -f builtin; then __execd_builtin=$(unset -f declare; declare -f builtin); unset -f builtin; fi
[[ $__execd_posix ]] || unset -v POSIXLY_CORRECT
{
builtin printf '%s\0' "$PWD" "$__execd_on" "${__execd_builtin-}"; builtin set +o; builtin printf '\0'; builtin shopt -p
builtin printf '\0'; builtin umask -p; builtin printf '\0'; builtin declare -Fx; builtin declare -Fr
builtin printf '\0'; builtin alias -p; builtin printf '\0'; builtin unalias -a; builtin mapfile -t __execd_names < <(builtin compgen -v)
for __execd_name in "${__execd_names[@]}"; do
builtin printf '%s\0%s\0' "$__execd_name" "${!__execd_name-}"; builtin declare -p "$__execd_name"; builtin printf '\0'
done; builtin shopt -s extdebug; builtin mapfile -t __execd_names < <(builtin compgen -A function)
for __execd_name in "${__execd_names[@]}"; do
builtin printf '()\0'; builtin declare -F -- "$__execd_name"; builtin printf '\0'; builtin declare -f -- "$__execd_name"; builtin printf '\0'
done; builtin printf 'end\0'
} >&251
[[ ! ${__execd_builtin-} ]]
); then builtin trap - DEBUG ERR RETURN; builtin set +x; builtin exit "$__execd"; fi
(POSIXLY_CORRECT=; exit "$__execd") && (( 1 )); } >/dev/null 2>/dev/null
}`

// resetLine returns text for bash that follows a compound command and gives the next line the number n+1. It is a
// redirection, because bash expands redirections in the shell itself, so that the assignment to LINENO persists.
func resetLine(n int) string { return fmt.Sprintf(" 0<&$((LINENO=%d,0))\n", n) }

// isFunction stands in place of a variable's name in the output of bashDriver, and marks a function.
const isFunction = "()"

// shDriver is the driver for images without bash. It keeps exported variables and the working directory. It sources the
// command from descriptor 3 as a separate script, so that the command's lines count from 1.
const shDriver = `{ . /proc/self/fd/3 9>&-
__execd=$?; unset -f printf env; { printf '%s\0' "$PWD"; env -0 && printf 'end\0'; } >&9 2>/dev/null; exit "$__execd"; }`

// shInput returns the input of shDriver: the command, which first closes the descriptor of its own script.
func shInput(command string) []byte { return []byte("exec 3<&-; " + command) }

// shellState is the kept state. The zero value is the state of a new session.
type shellState struct {
	directory string
	script    []byte             // text that bash evaluates before it sets the options
	options   []byte             // set -o options, a command per line; set late, because some would disturb the script
	last      []byte             // evaluated after the options: expansion of aliases, a function with the name builtin
	env       map[string]*string // without bash: variables that were set; nil for those that were unset
}

// initialLast enables aliases, which a shell that is not interactive does not expand by default.
const initialLast = "\\builtin shopt -s expand_aliases\n"

// apply returns the environment of a run: the given one with the changes of the session.
func (s *shellState) apply(given map[string]string) map[string]string {
	env := maps.Clone(given)
	for name, value := range s.env {
		if value == nil {
			delete(env, name)
		} else {
			env[name] = *value
		}
	}
	env["PWD"] = s.directory
	return env
}

// input returns the input of bashDriver: the script, and the text of the run. That text begins with one compound
// command, which bash parses as a whole before aliases are expanded.
func (s *shellState) input(exports, command string) []byte {
	last := s.last
	if last == nil {
		last = []byte(initialLast)
	}
	return fmt.Appendf(nil, "%s\x00{ \\builtin unset -v __execd\n%s%s%s} 2>/dev/null%s%s\x00",
		s.script, exports, s.options, last, resetLine(0), command)
}

func (s *shellState) size() int { return len(s.script) + len(s.options) + len(s.last) }

var errStateSize = fmt.Errorf("the state of the session is larger than %d bytes and was not kept", stateLimit)

// readState returns the text that a driver wrote into a file; it is empty if the driver wrote none.
func readState(file *os.File) ([]byte, error) {
	text, err := sys.ReadBounded(file, stateLimit)
	if err != nil {
		return nil, errStateSize
	}
	return text, nil
}

// parseBash parses the output of bashDriver; ok is false if the output is not complete. given is the environment of the
// run before the changes of the session.
func parseBash(text []byte, given map[string]string) (state shellState, ok bool) {
	const header, perVariable = 8, 3
	fields := bytes.Split(text, []byte{0})
	if len(fields) < header+2 || (len(fields)-header-2)%perVariable != 0 || string(fields[len(fields)-2]) != "end" {
		return state, false
	}
	directory, on, builtin := fields[0], fields[1], fields[2]
	options, shopts, umask := switches(fields[3], on, "set -o ", "set +o "), switches(fields[4], on, "shopt -s ", "shopt -u "), fields[5]
	attributes, aliases := fields[6], fields[7]
	var script, functions, last bytes.Buffer
	// The script runs without expansion of aliases: the bodies of functions were expanded when they were defined, and
	// must not be expanded again.
	for line := range bytes.Lines(append(shopts, "shopt -u expand_aliases\n"...)) {
		if last.Len() == 0 && bytes.HasSuffix(line, []byte(" expand_aliases\n")) {
			last.Write(builtins(line))
		} else {
			script.Write(line)
		}
	}
	seen := map[string]bool{}
	for variables := fields[header : len(fields)-2]; len(variables) > 0; variables = variables[perVariable:] {
		name, value, declaration := string(variables[0]), string(variables[1]), variables[2]
		if name == isFunction {
			// bash lists the brace on a line of its own, but most users write it on the line of the name. It is moved
			// there, so that the line numbers of such functions stay the same.
			if before, after, found := bytes.Cut(declaration, []byte(" () \n{ \n")); found {
				functions.WriteString("{ :; }" + resetLine(lineBefore(value)))
				functions.Write(before)
				functions.WriteString(" () { \n")
				functions.Write(after)
			}
			continue
		}
		seen[name] = true
		former, inherited := given[name]
		if ownVariable(name) || (inherited && former == value && bytes.HasPrefix(declaration, []byte("declare -x "))) {
			continue
		}
		if inherited || name == "OLDPWD" { // exported from the start; a declaration cannot remove that attribute
			script.WriteString("unset -v " + name + "\n")
		}
		script.Write(declaration)
	}
	for name := range given {
		if environ.IsName(name) && !seen[name] && !ownVariable(name) {
			script.WriteString("unset -v " + name + "\n")
		}
	}
	script.Write(aliases)
	script.Write(umask)
	// After the functions are defined, a name can refer to a function of the session.
	script.Write(functions.Bytes())
	script.Write(builtins(attributes))
	if len(builtin) > 0 { // defined last, because the lines above need the original builtin
		last.Write(append(builtin, '\n'))
	}
	return shellState{directory: string(directory), script: script.Bytes(), options: builtins(options), last: last.Bytes()}, true
}

// lineBefore returns the number of the line before a function. place has the form "NAME LINE FILE".
func lineBefore(place string) int {
	words := strings.Fields(place)
	if len(words) < 2 {
		return 0
	}
	line, err := strconv.Atoi(words[1])
	if err != nil || line < 1 || line > math.MaxInt32 {
		return 0
	}
	return line - 1
}

// switches returns the commands that restore options. listing has a line "set +o NAME" or "shopt -u NAME" for each
// option, and on names the enabled options, separated by colons.
func switches(listing, on []byte, set, unset string) []byte {
	var out bytes.Buffer
	enabled := strings.Split(string(on), ":")
	for line := range bytes.Lines(listing) {
		words := bytes.Fields(line)
		if len(words) != 3 {
			continue
		}
		if slices.Contains(enabled, string(words[2])) {
			out.WriteString(set)
		} else {
			out.WriteString(unset)
		}
		out.Write(append(words[2], '\n'))
	}
	return out.Bytes()
}

// builtins prefixes each line so that it calls the builtin command, even if a function or alias has the same name.
func builtins(lines []byte) []byte {
	var out bytes.Buffer
	for line := range bytes.Lines(lines) {
		out.WriteString(`\builtin `)
		out.Write(line)
	}
	return out.Bytes()
}

// ownVariable reports whether a variable belongs to the shell of one run, or is read-only in every shell.
func ownVariable(name string) bool {
	switch name {
	case "_", "DIRSTACK", "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "LINENO", "OPTERR", "PIPESTATUS", "PPID", "PWD",
		"RANDOM", "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "UID":
		return true
	}
	for _, prefix := range []string{"__execd", "BASH", "COMP_", "EPOCH", "READLINE_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// parseSh parses the output of shDriver; ok is false if the output is not complete.
func parseSh(text []byte, given map[string]string) (state shellState, ok bool) {
	fields := strings.Split(string(text), "\x00")
	if len(fields) < 3 || fields[len(fields)-2] != "end" {
		return state, false
	}
	state = shellState{directory: fields[0], env: map[string]*string{}}
	seen := map[string]bool{}
	for _, entry := range fields[1 : len(fields)-2] {
		name, value, found := strings.Cut(entry, "=")
		if !found || name == "" || ownVariable(name) {
			continue
		}
		seen[name] = true
		if former, inherited := given[name]; !inherited || former != value {
			state.env[name] = &value
		}
	}
	for name := range given {
		if !seen[name] && !ownVariable(name) {
			state.env[name] = nil
		}
	}
	return state, true
}

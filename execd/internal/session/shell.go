package session

// What a bash session keeps between its runs, and the program that carries it.
//
// Each run is a shell of its own. It reads the state and the command from one
// file in memory and writes the new state to another one when the command is
// over. Nothing of this is on disk or in the output, nor in an argument list,
// which every user can read.
//
// Invariants
//   - Kept: variables of every kind with their attributes, functions, aliases,
//     set -o, shopt, umask, working directory. Not kept: jobs, descriptors, traps.
//   - A run that ends before its shell does so by itself (exit, exec, a signal,
//     set -e) leaves the state as it was.
//   - A variable that only repeats what the daemon or EXECD_ENVS gave is not kept:
//     the next run takes the then current value.
//   - What comes back is text for the user's own shell, never run by anybody else;
//     its size is bounded and its form is checked.
//   - Line numbers in messages and in LINENO count the user's lines, from 1 in each
//     run. A function of an earlier run keeps the numbers of the run that defined it.

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

// bashDriver runs in the shell of a session: descriptor 3 gives the state and the
// command, descriptor 4 takes the new state. It is one compound command, so that
// aliases of the session cannot change how it is read. bash puts a descriptor that
// it hides during a command above the one it hides it with: with 250, at 252, closed
// on exec. Were it only closed it would be at 10, which commands use as their own:
// what they opened there would get the state. So 250 and 251 stay open on /dev/null.
//
// A function of the session may even be called builtin. Only special builtins in
// POSIX mode come before functions; what that mode changes was read before it.
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

// resetLine, after a compound command in bash, makes the line that follows number n+1.
// A redirection is expanded in the shell itself, where an assignment to LINENO lasts.
func resetLine(n int) string { return fmt.Sprintf(" 0<&$((LINENO=%d,0))\n", n) }

// isFunction, in the place of a variable's name, marks a function in what bashDriver wrote.
const isFunction = "()"

// shDriver is for images without bash: exported variables and the working directory are kept.
// Descriptor 3 gives the command, as a script of its own: so its lines count from 1.
const shDriver = `{ . /proc/self/fd/3 9>&-
__execd=$?; unset -f printf env; { printf '%s\0' "$PWD"; env -0 && printf 'end\0'; } >&9 2>/dev/null; exit "$__execd"; }`

// shInput is what a sh driver reads: the text of the run, which is not to have its script open.
func shInput(command string) []byte { return []byte("exec 3<&-; " + command) }

// shellState is what is kept. The zero value is that of a new session.
type shellState struct {
	directory string
	script    []byte             // text that a bash evaluates before it sets the options
	options   []byte             // its options, one command in a line; some would disturb what is done before a command
	last      []byte             // then whether aliases are expanded, and a function called builtin
	env       map[string]*string // without bash: what was set, and nil for what was unset
}

// initialLast makes aliases useful although the shell is not interactive.
const initialLast = "\\builtin shopt -s expand_aliases\n"

// apply returns the environment of a run: the given one, and what the session made of it.
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

// input is what a bash driver reads: the script, and the text of the run. That begins
// with one compound command, read as a whole while no alias is expanded.
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

// readState returns the text a driver left in a file, nil if there is none.
func readState(file *os.File) ([]byte, error) {
	text, err := sys.ReadBounded(file, stateLimit)
	if err != nil {
		return nil, errStateSize
	}
	return text, nil
}

// parseBash reads what bashDriver wrote; ok is false when it is not whole. given
// is the environment of the run without what the session had made of it.
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
	// Without aliases: bodies of functions were expanded when they were defined, and are not again.
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
			// bash lists the brace on a line of its own. Most texts have it with the name: these keep their numbers.
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
		if inherited || name == "OLDPWD" { // exported from the start, which no declaration takes back
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
	// From here on a name may mean a function of the session.
	script.Write(functions.Bytes())
	script.Write(builtins(attributes))
	if len(builtin) > 0 { // it takes the name from everything above
		last.Write(append(builtin, '\n'))
	}
	return shellState{directory: string(directory), script: script.Bytes(), options: builtins(options), last: last.Bytes()}, true
}

// lineBefore is the number of the line above a function, whose place is given as "NAME LINE FILE".
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

// switches lists the options of a listing, "set +o NAME" or "shopt -u NAME" in a line, as they are now.
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

// builtins makes sure that each line calls a builtin command, whatever is called the same.
func builtins(lines []byte) []byte {
	var out bytes.Buffer
	for line := range bytes.Lines(lines) {
		out.WriteString(`\builtin `)
		out.Write(line)
	}
	return out.Bytes()
}

// ownVariable reports whether a variable belongs to the shell of one run or is read-only in every shell.
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

// parseSh reads what shDriver wrote.
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

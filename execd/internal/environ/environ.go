// Package environ builds the environments of child processes, and expands variables.
//
// Invariants
//   - The daemon reads its own environment once, at its start. It removes the variables in Credentials, so that no
//     child gets them. Only the entrypoint and the bootstrap script before it get JUPYTER_TOKEN.
//   - The variables of an init take precedence over this environment. The next init replaces all of them.
//   - EXECD_ENVS is always set for a child (not in a Fixed environment), and its file is read for each command.
//   - Expansion replaces only $NAME and ${NAME}; all other text is literal.
package environ

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"sallyport.dev/execd/internal/account"
)

// Credentials are the variables that no child gets. The exception is JUPYTER_TOKEN for the entrypoint, which starts
// Jupyter in the code image.
var Credentials = []string{
	"EXECD_ACCESS_TOKEN", "JUPYTER_TOKEN", "EXECD_RUNTIME_INIT", "EXECD_ISOLATION_CONFIG", "OPENSANDBOX_LIFECYCLE",
}

const defaultEnvFile = "/opt/opensandbox/.env"

// Environment is the daemon's environment without credentials, as its children get it.
type Environment struct {
	visible atomic.Pointer[map[string]string] // own, overridden by bound; the map is replaced, never changed
	Warn    func(problem string)              // receives problems of the EXECD_ENVS file; nil: no warnings

	mutex    sync.Mutex
	own      map[string]string
	bound    map[string]string
	jupyter  string // JUPYTER_TOKEN for the entrypoint; can be empty
	warned   string // problem of the EXECD_ENVS file at its last read; empty: none
	original []byte // content of the EXECD_ENVS file before the first command, up to envFileLimit
}

// New makes an Environment from the process environment ("KEY=value" entries).
func New(environ []string) *Environment {
	env := &Environment{own: Map(environ)}
	env.jupyter = env.own["JUPYTER_TOKEN"]
	for _, name := range Credentials {
		delete(env.own, name)
	}
	if env.own["EXECD_ENVS"] == "" {
		env.own["EXECD_ENVS"] = defaultEnvFile
	}
	env.original, _, _ = readEnvFile(env.own["EXECD_ENVS"])
	env.publish()
	return env
}

// Fixed makes an Environment with exactly these variables. It reads an EXECD_ENVS file only if they name one.
func Fixed(environ []string) *Environment {
	env := &Environment{own: Map(environ)}
	env.publish()
	return env
}

// Map converts "KEY=value" entries to a map. The last of several entries with the same key is used.
func Map(environ []string) map[string]string {
	variables := map[string]string{}
	for _, entry := range environ {
		if key, value, ok := strings.Cut(entry, "="); ok && key != "" {
			variables[key] = value
		}
	}
	return variables
}

func (e *Environment) publish() {
	visible := maps.Clone(e.own)
	maps.Copy(visible, e.bound)
	e.visible.Store(&visible)
}

func (e *Environment) base() map[string]string { return *e.visible.Load() }

// Replace replaces the daemon's own variables. It removes Credentials, but keeps JUPYTER_TOKEN for the entrypoint. If
// EXECD_ENVS is missing, its former value stays.
func (e *Environment) Replace(variables map[string]string) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	envFile := cmp.Or(variables["EXECD_ENVS"], e.own["EXECD_ENVS"])
	e.own = maps.Clone(variables)
	e.jupyter = e.own["JUPYTER_TOKEN"]
	maps.DeleteFunc(e.own, func(name, _ string) bool { return slices.Contains(Credentials, name) })
	e.own["EXECD_ENVS"] = envFile
	e.original, _, _ = readEnvFile(envFile)
	e.publish()
}

// Bind replaces the variables of an init.
func (e *Environment) Bind(variables map[string]string) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	e.bound = maps.Clone(variables)
	e.publish()
}

// Lookup returns a variable of the daemon's environment.
func (e *Environment) Lookup(name string) (string, bool) {
	value, ok := e.base()[name]
	return value, ok
}

// Home returns the home directory of the daemon's user, without a final slash.
func (e *Environment) Home(accounts func() account.Accounts) string {
	home, ok := e.base()["HOME"]
	if !ok || !filepath.IsAbs(home) {
		home = accounts().Home(uint32(os.Geteuid()))
	}
	return strings.TrimSuffix(home, "/")
}

// ForCommand returns the variables for a command. In order of increasing precedence they come from the daemon, the
// EXECD_ENVS file and the request.
func (e *Environment) ForCommand(request map[string]*string) map[string]string {
	merged := maps.Clone(e.base())
	for _, entry := range e.stored(merged["EXECD_ENVS"]) {
		merged[entry.key] = entry.value
	}
	for key, value := range request {
		if value != nil {
			merged[key] = *value
		}
	}
	return merged
}

// stored returns the entries of the EXECD_ENVS file at path, and none if path is empty.
func (e *Environment) stored(path string) []envEntry {
	if path == "" {
		return nil
	}
	data, more, problem := readEnvFile(path)
	entries, skipped := parseEnvFile(data, more, e.Lookup)
	if skipped > 0 {
		problem = strings.TrimPrefix(problem+fmt.Sprintf("; %d malformed entries are skipped", skipped), "; ")
	}
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if problem != e.warned && problem != "" && e.Warn != nil { // warn once for a problem, not for each command
		e.Warn(problem)
	}
	e.warned = problem
	return entries
}

// ForEntrypoint returns the environment for the user's entrypoint: the daemon's environment and JUPYTER_TOKEN.
func (e *Environment) ForEntrypoint() []string {
	merged := maps.Clone(e.base())
	e.mutex.Lock()
	token := e.jupyter
	e.mutex.Unlock()
	if token != "" {
		merged["JUPYTER_TOKEN"] = token
	}
	return List(merged)
}

// RestoreFile restores the content that the EXECD_ENVS file had before the first command, up to envFileLimit.
func (e *Environment) RestoreFile() error {
	e.mutex.Lock()
	path, original := e.own["EXECD_ENVS"], e.original
	e.mutex.Unlock()
	if data, more, problem := readEnvFile(path); !more && problem == "" && bytes.Equal(data, original) {
		return nil
	}
	// Make a new file, so that nothing is written through a link. If the old file cannot be removed (a mount), truncate
	// it.
	flags := os.O_CREATE | os.O_EXCL
	if err := os.Remove(path); err != nil && !absent(err) {
		flags = os.O_TRUNC
	}
	file, err := os.OpenFile(path, flags|os.O_WRONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o644)
	if err != nil {
		return err
	}
	_, err = file.Write(original)
	return errors.Join(err, file.Close())
}

// List converts a map of variables to sorted "KEY=value" entries.
func List(variables map[string]string) []string {
	list := make([]string, 0, len(variables))
	for key, value := range variables {
		list = append(list, key+"="+value)
	}
	sort.Strings(list)
	return list
}

// undefinedRule returns the text that replaces a reference to an undefined variable.
type undefinedRule func(reference string) string

func dropUndefined(string) string { return "" }

// KeepUndefined leaves a reference to an undefined variable as it is.
func KeepUndefined(reference string) string { return reference }

func isNameStart(c byte) bool { return c == '_' || c|0x20 >= 'a' && c|0x20 <= 'z' }

// IsNameByte reports whether a byte is valid in the name of a variable.
func IsNameByte(c byte) bool { return isNameStart(c) || c >= '0' && c <= '9' }

// LookupIn returns a function that looks up variables in a map.
func LookupIn(m map[string]string) lookupFunc {
	return func(n string) (string, bool) { v, ok := m[n]; return v, ok }
}

type lookupFunc = func(string) (string, bool)

// IsName reports whether a text is a valid name of a variable.
func IsName(name string) bool {
	if name == "" || !isNameStart(name[0]) {
		return false
	}
	for i := range len(name) {
		if !IsNameByte(name[i]) {
			return false
		}
	}
	return true
}

// Expand replaces $NAME and ${NAME} with the values of the variables. Values are not expanded again.
func Expand(text string, lookup lookupFunc, undefined undefinedRule) string {
	if strings.IndexByte(text, '$') < 0 {
		return text
	}
	out := boundedText{limit: math.MaxInt}
	out.expand(text, lookup, undefined)
	return out.text.String()
}

// boundedText is a text with a limit. It refuses the first piece that exceeds the limit, and every later piece.
type boundedText struct {
	text  strings.Builder
	limit int
	over  bool // a piece was refused
}

func (t *boundedText) add(piece string) {
	if t.over || len(piece) > t.limit-t.text.Len() {
		t.over = true
		return
	}
	t.text.WriteString(piece)
}

// expand adds the expansion of a text, until the limit is exceeded.
func (t *boundedText) expand(text string, lookup lookupFunc, undefined undefinedRule) {
	for begin := 0; !t.over; {
		dollar := strings.IndexByte(text[begin:], '$')
		if dollar < 0 {
			t.add(text[begin:])
			return
		}
		t.add(text[begin : begin+dollar])
		begin += dollar
		name, length := variableAt(text[begin:])
		if length == 0 {
			t.add("$")
			begin++
			continue
		}
		value, ok := lookup(name)
		if !ok {
			value = undefined(text[begin : begin+length])
		}
		t.add(value)
		begin += length
	}
}

// variableAt parses a reference to a variable at the start of text. It returns length 0 if there is none.
func variableAt(text string) (name string, length int) {
	if len(text) < 2 || text[0] != '$' {
		return "", 0
	}
	begin := 1
	if text[1] == '{' {
		begin = 2
	}
	end := begin
	for end < len(text) && IsNameByte(text[end]) {
		end++
	}
	if !IsName(text[begin:end]) {
		return "", 0
	}
	if begin == 1 {
		return text[begin:end], end
	}
	if end == len(text) || text[end] != '}' {
		return "", 0
	}
	return text[begin:end], end + 1
}

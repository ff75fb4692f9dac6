package main

// Environments of children and the expansion of variables.
//
// Invariants
//   - The daemon's own environment is read once at start; the credentials of the
//     contract (18.4) are taken out of it and never reach a child. What an init (15.1)
//     binds lies above it and is replaced as a whole by the next one.
//   - EXECD_ENVS is always set for a child and its file is read for each command.
//   - Expansion touches $NAME and ${NAME} only; everything else is literal.

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
)

// credentials never reach a child. JUPYTER_TOKEN is kept for the entrypoint,
// which starts Jupyter itself in the code image.
var credentials = []string{
	"EXECD_ACCESS_TOKEN", "JUPYTER_TOKEN", "EXECD_RUNTIME_INIT", "EXECD_ISOLATION_CONFIG", "OPENSANDBOX_LIFECYCLE",
}

const defaultEnvFile = "/opt/opensandbox/.env"

// Environment is the daemon's environment as children may see it.
type Environment struct {
	visible  atomic.Pointer[map[string]string] // own and bound together; never changed, only replaced
	jupyter  string                            // JUPYTER_TOKEN of the entrypoint, may be empty
	envFile  string                            // "": there is none
	warnSkip func(skipped int)

	mutex sync.Mutex
	own   map[string]string
	bound map[string]string
}

// NewEnvironment takes the process environment ("KEY=value" entries).
func NewEnvironment(environ []string) *Environment {
	env := &Environment{own: environMap(environ), warnSkip: func(int) {}}
	env.jupyter = env.own["JUPYTER_TOKEN"]
	for _, name := range credentials {
		delete(env.own, name)
	}
	if env.envFile = env.own["EXECD_ENVS"]; env.envFile == "" {
		env.envFile = defaultEnvFile
		env.own["EXECD_ENVS"] = defaultEnvFile
	}
	env.publish()
	return env
}

func environMap(environ []string) map[string]string {
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

// Replace exchanges the daemon's own variables; credentials stay out.
func (e *Environment) Replace(variables map[string]string) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	e.own = maps.Clone(variables)
	maps.DeleteFunc(e.own, func(name, _ string) bool { return slices.Contains(credentials, name) })
	e.own["EXECD_ENVS"] = e.envFile
	e.publish()
}

// Bind exchanges the variables of an init.
func (e *Environment) Bind(variables map[string]string) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	e.bound = maps.Clone(variables)
	e.publish()
}

// Lookup reads the daemon's environment.
func (e *Environment) Lookup(name string) (string, bool) {
	value, ok := e.base()[name]
	return value, ok
}

// Home is the daemon user's home directory without a final slash.
func (e *Environment) Home(accounts func() Accounts) string {
	home, ok := e.base()["HOME"]
	if !ok || !filepath.IsAbs(home) {
		home = accounts().Home(uint32(os.Geteuid()))
	}
	return strings.TrimSuffix(home, "/")
}

// ForCommand merges, low to high: daemon, EXECD_ENVS file, request.
func (e *Environment) ForCommand(request map[string]*string) map[string]string {
	merged := maps.Clone(e.base())
	entries, skipped := parseEnvFile(readRegular(e.envFile, envFileLimit), e.Lookup)
	if skipped > 0 {
		e.warnSkip(skipped)
	}
	for _, entry := range entries {
		merged[entry.key] = entry.value
	}
	for key, value := range request {
		if value != nil {
			merged[key] = *value
		}
	}
	return merged
}

// ForEntrypoint is the daemon's environment for the user's entrypoint.
func (e *Environment) ForEntrypoint() []string {
	merged := maps.Clone(e.base())
	if e.jupyter != "" {
		merged["JUPYTER_TOKEN"] = e.jupyter
	}
	return environList(merged)
}

func environList(variables map[string]string) []string {
	list := make([]string, 0, len(variables))
	for key, value := range variables {
		list = append(list, key+"="+value)
	}
	sort.Strings(list)
	return list
}

// undefinedRule says what becomes of a reference to an undefined variable.
type undefinedRule func(reference string) string

func dropUndefined(string) string           { return "" }
func keepUndefined(reference string) string { return reference }
func isNameStart(c byte) bool               { return c == '_' || c|0x20 >= 'a' && c|0x20 <= 'z' }
func isNameByte(c byte) bool                { return isNameStart(c) || c >= '0' && c <= '9' }
func mapLookup(m map[string]string) lookupFunc {
	return func(n string) (string, bool) { v, ok := m[n]; return v, ok }
}

type lookupFunc = func(string) (string, bool)

func isVariableName(name string) bool {
	if name == "" || !isNameStart(name[0]) {
		return false
	}
	for i := range len(name) {
		if !isNameByte(name[i]) {
			return false
		}
	}
	return true
}

// expandVariables replaces $NAME and ${NAME}; values are not expanded again.
func expandVariables(text string, lookup lookupFunc, undefined undefinedRule) string {
	if strings.IndexByte(text, '$') < 0 {
		return text
	}
	var out strings.Builder
	for i := 0; i < len(text); {
		name, length := variableAt(text[i:])
		if length == 0 {
			out.WriteByte(text[i])
			i++
			continue
		}
		if value, ok := lookup(name); ok {
			out.WriteString(value)
		} else {
			out.WriteString(undefined(text[i : i+length]))
		}
		i += length
	}
	return out.String()
}

// variableAt recognises a reference at the start of text; length 0 means none.
func variableAt(text string) (name string, length int) {
	if len(text) < 2 || text[0] != '$' {
		return "", 0
	}
	if text[1] == '{' {
		end := strings.IndexByte(text, '}')
		if end < 0 || !isVariableName(text[2:end]) {
			return "", 0
		}
		return text[2:end], end + 1
	}
	end := 1
	for end < len(text) && isNameByte(text[end]) {
		end++
	}
	if !isVariableName(text[1:end]) {
		return "", 0
	}
	return text[1:end], end
}

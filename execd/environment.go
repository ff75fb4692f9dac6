package main

// Environments of children and the expansion of variables.
//
// Invariants
//   - The daemon's own environment is read once at start; the credentials of the
//     contract (18.4) are taken out of it and never reach a child.
//   - EXECD_ENVS is always set for a child and its file is read for each command.
//   - Expansion touches $NAME and ${NAME} only; everything else is literal.

import (
	"os"
	"path/filepath"
	"sort"
	"strings"
)

// credentials never reach a child. JUPYTER_TOKEN is kept for the entrypoint,
// which starts Jupyter itself in the code image.
var credentials = []string{
	"EXECD_ACCESS_TOKEN", "JUPYTER_TOKEN", "EXECD_RUNTIME_INIT", "EXECD_ISOLATION_CONFIG", "OPENSANDBOX_LIFECYCLE",
}

const defaultEnvFile = "/opt/opensandbox/.env"

// Environment is the daemon's environment as children may see it.
type Environment struct {
	base     map[string]string
	jupyter  string // JUPYTER_TOKEN of the entrypoint, may be empty
	envFile  string
	warnSkip func(skipped int)
}

// NewEnvironment takes the process environment ("KEY=value" entries).
func NewEnvironment(environ []string) *Environment {
	env := &Environment{base: map[string]string{}, warnSkip: func(int) {}}
	for _, entry := range environ {
		if key, value, ok := strings.Cut(entry, "="); ok && key != "" {
			env.base[key] = value
		}
	}
	env.jupyter = env.base["JUPYTER_TOKEN"]
	for _, name := range credentials {
		delete(env.base, name)
	}
	if env.envFile = env.base["EXECD_ENVS"]; env.envFile == "" {
		env.envFile = defaultEnvFile
		env.base["EXECD_ENVS"] = defaultEnvFile
	}
	return env
}

// Lookup reads the daemon's environment.
func (e *Environment) Lookup(name string) (string, bool) {
	value, ok := e.base[name]
	return value, ok
}

// Home is the daemon user's home directory without a final slash.
func (e *Environment) Home(accounts func() Accounts) string {
	home, ok := e.base["HOME"]
	if !ok || !filepath.IsAbs(home) {
		home = accounts().Home(uint32(os.Geteuid()))
	}
	return strings.TrimSuffix(home, "/")
}

// ForCommand merges, low to high: daemon, EXECD_ENVS file, request.
func (e *Environment) ForCommand(request map[string]*string) map[string]string {
	merged := make(map[string]string, len(e.base)+len(request)+8)
	for key, value := range e.base {
		merged[key] = value
	}
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
	merged := make(map[string]string, len(e.base)+1)
	for key, value := range e.base {
		merged[key] = value
	}
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

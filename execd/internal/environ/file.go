package environ

// The EXECD_ENVS file: variables that commands leave for later commands.
//
// Invariants
//   - Reading and parsing never fail: a malformed entry is skipped and counted, and a file that cannot be read has no
//     entries. A missing file counts as empty; every other problem causes a warning.
//   - In a file above the limit, only entries that are complete within the limit are used. All data from the first
//     incomplete entry on is ignored, because it can be a part of a value.
//   - Single-quoted values are literal. In double-quoted and unquoted values, $NAME and ${NAME} are expanded with the
//     daemon's environment. Quoted values can span lines.
//   - The last entry of a key is used; keys match [A-Za-z_][A-Za-z0-9_]*.
//   - The length of each entry and the total length of the values are limited, so that execve accepts them.
//   - A warning describes the problem and contains no name or value of a variable.

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"sallyport.dev/execd/internal/sys"
)

const (
	envFileLimit  = 1 << 20   // limit of the bytes that are read, and of the bytes of all values together
	envEntryLimit = 128 << 10 // Linux's limit of one string of an environment, including its final NUL
)

// PrepareFile creates the EXECD_ENVS file if it is missing. If that fails, it warns.
func (e *Environment) PrepareFile() {
	path, _ := e.Lookup("EXECD_ENVS")
	if _, err := os.Stat(path); !absent(err) {
		return
	}
	if err := createEnvFile(path); err != nil && e.Warn != nil {
		e.Warn("cannot be created: " + sys.Reason(err))
	}
}

// createEnvFile makes an empty file and its missing parent directories.
func createEnvFile(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NONBLOCK, 0o644)
	if err != nil {
		return err
	}
	return file.Close()
}

// readEnvFile returns the content up to envFileLimit, whether the file is longer, and the text of a warning (empty if
// there is no problem).
func readEnvFile(path string) (data []byte, more bool, problem string) {
	// Check the type before opening, because opening a device can have an effect.
	info, err := os.Stat(path)
	if absent(err) {
		return nil, false, ""
	}
	if err == nil && !info.Mode().IsRegular() {
		return nil, false, "is not a regular file"
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if absent(err) {
		return nil, false, ""
	}
	if err != nil {
		return nil, false, "cannot be read: " + sys.Reason(err)
	}
	defer file.Close()
	if info, err = file.Stat(); err == nil && !info.Mode().IsRegular() {
		return nil, false, "is not a regular file"
	}
	// Do not use the size: the file can grow meanwhile, and some file systems report no size.
	data, err = io.ReadAll(io.LimitReader(file, envFileLimit+1))
	if err != nil {
		return nil, false, "cannot be read: " + sys.Reason(err)
	}
	if len(data) > envFileLimit {
		return data[:envFileLimit], true, fmt.Sprintf("is larger than %d bytes; what follows these is skipped", envFileLimit)
	}
	return data, false, ""
}

// absent reports whether err means that no file is at a path, including a path through something that is no directory.
func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) }

// parseEnvFile returns the entries in order and the number of skipped ones. If more is set, the data is only the
// beginning of the file.
func parseEnvFile(data []byte, more bool, lookup lookupFunc) (entries []envEntry, skipped int) {
	parser := &envParser{lookup: lookup, left: envFileLimit}
	for len(data) > 0 {
		entry, rest, verdict := parser.next(data)
		if more && (verdict == envOpen || (len(rest) == 0 && data[len(data)-1] != '\n')) {
			return entries, skipped
		}
		data = rest
		switch verdict {
		case envTaken:
			entries = append(entries, entry)
		case envMalformed, envOpen:
			skipped++
		case envNothing:
		}
	}
	return entries, skipped
}

type envEntry struct{ key, value string }

type envVerdict int

const (
	envNothing envVerdict = iota // blank or comment
	envTaken
	envMalformed
	envOpen // a quote is never closed
)

type envParser struct {
	lookup lookupFunc
	left   int // remaining bytes for values
}

// next parses one entry and returns the data after it.
func (p *envParser) next(data []byte) (envEntry, []byte, envVerdict) {
	line, after, _ := bytes.Cut(data, []byte{'\n'})
	trimmed := bytes.TrimSpace(line)
	if len(trimmed) == 0 || trimmed[0] == '#' {
		return envEntry{}, after, envNothing
	}
	name, raw, found := bytes.Cut(line, []byte{'='})
	key := strings.TrimSpace(string(name))
	if !found || !IsName(key) {
		return envEntry{}, after, envMalformed
	}
	value := &boundedText{limit: min(p.left, envEntryLimit-len(key)-len("=\x00"))}
	defer func() { p.left -= value.text.Len() }()
	raw = bytes.TrimLeft(raw, " \t")
	if len(raw) == 0 || (raw[0] != '"' && raw[0] != '\'') {
		value.expand(strings.TrimSpace(string(raw)), p.lookup, dropUndefined)
		return value.entry(key, after, after)
	}
	rest, ok := readQuoted(data[len(line)-len(raw):], p.lookup, value) // from the quote to the end of the file
	if !ok {
		return envEntry{}, after, envOpen // resume on the next line
	}
	tail, beyond, _ := bytes.Cut(rest, []byte{'\n'})
	if tail = bytes.TrimSpace(tail); len(tail) > 0 && tail[0] != '#' {
		return envEntry{}, after, envMalformed
	}
	return value.entry(key, beyond, after)
}

// entry returns the entry with this value and the data that follows it: beyond, or after if the value is malformed,
// because parsing then resumes on the next line.
func (t *boundedText) entry(key string, beyond, after []byte) (envEntry, []byte, envVerdict) {
	value := t.text.String()
	if t.over || strings.IndexByte(value, 0) >= 0 {
		return envEntry{}, after, envMalformed
	}
	return envEntry{key, value}, beyond, envTaken
}

// readQuoted parses a quoted value. text begins with the quote; ok is false if the closing quote is missing.
func readQuoted(text []byte, lookup lookupFunc, value *boundedText) (rest []byte, ok bool) {
	if text[0] == '\'' {
		end := bytes.IndexByte(text[1:], '\'')
		if end < 0 {
			return nil, false
		}
		value.add(string(text[1 : 1+end]))
		return text[end+2:], true
	}
	begin := 1 // start of the text that is not yet in value
	for i := 1; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			value.expand(string(text[begin:i]), lookup, dropUndefined)
			return text[i+1:], true
		case c == '\\' && i+1 < len(text) && strings.IndexByte(`nrt\"`, text[i+1]) >= 0:
			// An escaped character is never part of a variable reference.
			value.expand(string(text[begin:i]), lookup, dropUndefined)
			i++
			value.add(string(unescaped(text[i])))
			begin = i + 1
		}
	}
	return nil, false
}

func unescaped(c byte) rune {
	switch c {
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return rune(c)
}

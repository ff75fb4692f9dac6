package main

// The EXECD_ENVS file: variables that outlive one command.
//
// Invariants
//   - Parsing never fails: a malformed entry is skipped and counted.
//   - Single-quoted values are literal, double-quoted and bare ones expand
//     $NAME and ${NAME} with the daemon's environment; quoted ones may span lines.
//   - Later entries win; keys match [A-Za-z_][A-Za-z0-9_]*.

import (
	"bytes"
	"strings"
)

const envFileLimit = 1 << 20

// parseEnvFile returns the entries in order and the number of skipped ones.
func parseEnvFile(data []byte, lookup func(string) (string, bool)) (entries []envEntry, skipped int) {
	for len(data) > 0 {
		entry, rest, verdict := nextEnvEntry(data, lookup)
		data = rest
		switch verdict {
		case envTaken:
			entries = append(entries, entry)
		case envMalformed:
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
)

// nextEnvEntry reads one entry and returns what follows it.
func nextEnvEntry(data []byte, lookup func(string) (string, bool)) (envEntry, []byte, envVerdict) {
	line, after, _ := bytes.Cut(data, []byte{'\n'})
	trimmed := bytes.TrimSpace(line)
	if len(trimmed) == 0 || trimmed[0] == '#' {
		return envEntry{}, after, envNothing
	}
	name, raw, found := bytes.Cut(line, []byte{'='})
	key := strings.TrimSpace(string(name))
	if !found || !isVariableName(key) {
		return envEntry{}, after, envMalformed
	}
	raw = bytes.TrimLeft(raw, " \t")
	if len(raw) == 0 || (raw[0] != '"' && raw[0] != '\'') {
		value := strings.TrimSpace(string(raw))
		if strings.IndexByte(value, 0) >= 0 {
			return envEntry{}, after, envMalformed
		}
		return envEntry{key, expandVariables(value, lookup, dropUndefined)}, after, envTaken
	}
	quoted := data[len(line)-len(raw):] // from the quote to the end of the file
	value, rest, ok := readQuoted(quoted, lookup)
	if !ok || strings.IndexByte(value, 0) >= 0 {
		return envEntry{}, after, envMalformed // resume on the next line
	}
	tail, beyond, _ := bytes.Cut(rest, []byte{'\n'})
	if tail = bytes.TrimSpace(tail); len(tail) > 0 && tail[0] != '#' {
		return envEntry{}, after, envMalformed
	}
	return envEntry{key, value}, beyond, envTaken
}

// readQuoted reads a quoted value that begins with its quote.
func readQuoted(text []byte, lookup func(string) (string, bool)) (value string, rest []byte, ok bool) {
	if text[0] == '\'' {
		end := bytes.IndexByte(text[1:], '\'')
		if end < 0 {
			return "", nil, false
		}
		return string(text[1 : 1+end]), text[end+2:], true
	}
	var out, plain strings.Builder
	flush := func() {
		out.WriteString(expandVariables(plain.String(), lookup, dropUndefined))
		plain.Reset()
	}
	for i := 1; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			flush()
			return out.String(), text[i+1:], true
		case c == '\\' && i+1 < len(text) && strings.IndexByte(`nrt\"`, text[i+1]) >= 0:
			i++
			flush() // an escaped character is never part of a variable reference
			out.WriteByte(unescaped(text[i]))
		default:
			plain.WriteByte(c)
		}
	}
	return "", nil, false
}

func unescaped(c byte) byte {
	switch c {
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return c
}

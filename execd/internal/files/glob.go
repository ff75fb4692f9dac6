package files

// File name patterns of /files/search.
//
// Invariants
//   - A pattern is compiled once. An invalid pattern is an error.
//   - Matching costs O(pattern × name) per alternative, and the number of alternatives is bounded.

import (
	"errors"
	"strings"
	"unicode/utf8"
)

const (
	patternLimit     = 4096
	alternativeLimit = 256
)

var errPattern = errors.New("invalid pattern")

type globToken struct {
	kind   globKind
	char   rune
	ranges []runeRange
	negate bool
}

type globKind int

const (
	globChar globKind = iota
	globAny           // ?
	globStar          // *
	globSet           // […]
)

type runeRange struct{ from, to rune }

// Glob is a compiled pattern for base names.
type Glob struct{ alternatives [][]globToken }

// CompileGlob compiles a pattern. It supports * ? [a-z] [^a] [!a] {a,b} (nested), \ and a leading **/.
func CompileGlob(pattern string) (Glob, error) {
	if len(pattern) > patternLimit {
		return Glob{}, errPattern
	}
	for strings.HasPrefix(pattern, "**/") {
		pattern = pattern[3:]
	}
	texts, err := expandBraces(pattern)
	if err != nil {
		return Glob{}, err
	}
	var glob Glob
	for _, text := range texts {
		tokens, err := globTokens(text)
		if err != nil {
			return Glob{}, err
		}
		glob.alternatives = append(glob.alternatives, tokens)
	}
	return glob, nil
}

// Match reports whether any alternative of the pattern matches the whole name.
func (g Glob) Match(name string) bool {
	for _, tokens := range g.alternatives {
		if matchTokens(tokens, name) {
			return true
		}
	}
	return false
}

// expandBraces converts {a,b} to alternatives, breadth first.
func expandBraces(pattern string) ([]string, error) {
	queue, done := []string{pattern}, []string(nil)
	for len(queue) > 0 {
		if len(queue)+len(done) > alternativeLimit {
			return nil, errPattern
		}
		text := queue[0]
		queue = queue[1:]
		open, parts, end, err := firstBrace(text)
		if err != nil {
			return nil, err
		}
		if open < 0 {
			done = append(done, text)
			continue
		}
		for _, part := range parts {
			queue = append(queue, text[:open]+part+text[end:])
		}
	}
	return done, nil
}

// firstBrace finds the first brace group that is neither escaped nor in a set. open is negative if there is none.
func firstBrace(text string) (open int, parts []string, end int, err error) {
	open = -1
	depth, start := 0, 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '[':
			if skip := setEnd(text[i:]); skip > 0 {
				i += skip - 1
			}
		case '{':
			if depth == 0 {
				open, start = i, i+1
			}
			depth++
		case ',':
			if depth == 1 {
				parts = append(parts, text[start:i])
				start = i + 1
			}
		case '}':
			if depth == 0 {
				continue
			}
			if depth--; depth == 0 {
				return open, append(parts, text[start:i]), i + 1, nil
			}
		}
	}
	if depth > 0 {
		return 0, nil, 0, errPattern
	}
	return -1, nil, 0, nil
}

// setEnd returns the length of a set […] at the start of text, or 0 if the set is not closed.
func setEnd(text string) int {
	i := 1
	if i < len(text) && (text[i] == '^' || text[i] == '!') {
		i++
	}
	for first := true; i < len(text); i, first = i+1, false {
		switch {
		case text[i] == '\\':
			i++
		case text[i] == ']' && !first:
			return i + 1
		}
	}
	return 0
}

func globTokens(text string) ([]globToken, error) {
	var tokens []globToken
	for len(text) > 0 {
		char, size := utf8.DecodeRuneInString(text)
		switch char {
		case '*':
			if n := len(tokens); n == 0 || tokens[n-1].kind != globStar {
				tokens = append(tokens, globToken{kind: globStar})
			}
		case '?':
			tokens = append(tokens, globToken{kind: globAny})
		case '[':
			length := setEnd(text)
			if length == 0 {
				return nil, errPattern
			}
			token, err := globSetToken(text[1 : length-1])
			if err != nil {
				return nil, err
			}
			tokens, size = append(tokens, token), length
		case '\\':
			if len(text) == 1 {
				return nil, errPattern
			}
			next, width := utf8.DecodeRuneInString(text[1:])
			tokens, size = append(tokens, globToken{char: next}), 1+width
		default:
			tokens = append(tokens, globToken{char: char})
		}
		text = text[size:]
	}
	return tokens, nil
}

func globSetToken(inner string) (globToken, error) {
	token := globToken{kind: globSet}
	if inner != "" && (inner[0] == '^' || inner[0] == '!') {
		token.negate, inner = true, inner[1:]
	}
	next := func() (rune, bool) {
		inner = strings.TrimPrefix(inner, `\`)
		char, size := utf8.DecodeRuneInString(inner)
		inner = inner[size:]
		return char, size > 0
	}
	for inner != "" {
		from, ok := next()
		to := from
		if ok && len(inner) > 1 && inner[0] == '-' {
			inner = inner[1:]
			to, ok = next()
		}
		if !ok || to < from {
			return token, errPattern
		}
		token.ranges = append(token.ranges, runeRange{from, to})
	}
	return token, nil
}

func (t globToken) matches(char rune) bool {
	switch t.kind {
	case globAny:
		return true
	case globSet:
		for _, r := range t.ranges {
			if r.from <= char && char <= r.to {
				return !t.negate
			}
		}
		return t.negate
	}
	return t.char == char
}

// matchTokens reports whether the tokens match the whole name. It backtracks to the last star only, so the cost is not
// exponential.
func matchTokens(tokens []globToken, name string) bool {
	position, star, resume := 0, -1, ""
	for name != "" {
		char, size := utf8.DecodeRuneInString(name)
		switch {
		case position < len(tokens) && tokens[position].kind == globStar:
			star, resume = position, name
			position++
		case position < len(tokens) && tokens[position].matches(char):
			position++
			name = name[size:]
		case star >= 0:
			_, step := utf8.DecodeRuneInString(resume)
			resume = resume[step:]
			name, position = resume, star+1
		default:
			return false
		}
	}
	for position < len(tokens) && tokens[position].kind == globStar {
		position++
	}
	return position == len(tokens)
}

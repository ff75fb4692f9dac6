package httpx

// Routes and the paths that they match.
//
// Invariants
//   - A route is a method and the segments of a path; each must be equal.
//   - A path is split at its slashes as it was sent, then each segment is decoded once: an
//     encoded slash is part of a segment and never separates two.
//   - One slash at the end does not count; an id is never empty.

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Path is a path by its segments, which are decoded.
type Path []string

// SplitPath cuts a path as it was sent. One that does not begin with a slash has no segments.
func SplitPath(raw string) (Path, error) {
	rest, ok := strings.CutPrefix(raw, "/")
	if !ok {
		return nil, nil
	}
	path := Path(strings.Split(rest, "/"))
	for i, segment := range path {
		var err error
		if path[i], err = url.PathUnescape(segment); err != nil {
			return nil, err
		}
	}
	return path, nil
}

// Is reports whether a path has these segments and no others.
func (p Path) Is(segments ...string) bool { return slices.Equal(p, segments) }

// WithoutLastSlash is the path without a slash at its end.
func (p Path) WithoutLastSlash() Path {
	if last := len(p) - 1; last > 0 && p[last] == "" {
		return p[:last]
	}
	return p
}

// Below returns the text of the path behind some segments, which begins with a slash if there
// is more; ok is false where they are others, or where a segment holds a slash itself.
func (p Path) Below(segments ...string) (rest string, ok bool) {
	if len(p) < len(segments) || !p[:len(segments)].Is(segments...) {
		return "", false
	}
	var text strings.Builder
	for _, segment := range p[len(segments):] {
		if strings.Contains(segment, "/") {
			return "", false
		}
		text.WriteString("/" + segment)
	}
	return text.String(), true
}

// Route is a route; {} is a segment of its path that is an id.
type Route struct {
	Method, Path string
	Handler      func(id string) http.HandlerFunc
}

// Always is the handler of a route without an id.
func Always(handler http.HandlerFunc) func(string) http.HandlerFunc {
	return func(string) http.HandlerFunc { return handler }
}

// matches compares a path with that of the route, and returns the id in it.
func (r Route) matches(path Path) (id string, ok bool) {
	wanted := strings.Split(r.Path, "/")[1:]
	if len(wanted) != len(path) {
		return "", false
	}
	for i, segment := range wanted {
		switch {
		case segment == "{}" && path[i] != "":
			id = path[i]
		case segment != path[i]:
			return "", false
		}
	}
	return id, true
}

// FindRoute finds the handler of a request; nil where there is none.
func FindRoute(routes []Route, method string, path Path) http.HandlerFunc {
	for _, each := range routes {
		if each.Method != method {
			continue
		}
		if id, ok := each.matches(path); ok {
			return each.Handler(id)
		}
	}
	return nil
}

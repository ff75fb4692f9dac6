package httpx

// Routes, and how a path is compared with them.
//
// Invariants
//   - A route consists of a method and the segments of a path. It matches if the method and each segment are equal.
//   - A path is first split at its slashes, then each segment is decoded once. So an encoded slash is part of a segment
//     and does not separate two segments.
//   - One slash at the end is ignored. An id is never empty.

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Path is a path as a list of decoded segments.
type Path []string

// SplitPath splits a path that is still encoded. A path that does not begin with a slash has no segments.
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

// WithoutLastSlash returns the path without one slash at its end.
func (p Path) WithoutLastSlash() Path {
	if last := len(p) - 1; last > 0 && p[last] == "" {
		return p[:last]
	}
	return p
}

// Below returns the text of the path after the given first segments. The text begins with a slash unless it is empty.
// ok is false if the path begins with other segments, or if a later segment contains a slash.
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

// Route is a route. The segment {} of its path matches any id.
type Route struct {
	Method, Path string
	Handler      func(id string) http.HandlerFunc
}

// Always returns the handler of a route without an id.
func Always(handler http.HandlerFunc) func(string) http.HandlerFunc {
	return func(string) http.HandlerFunc { return handler }
}

// matches compares a path with the path of the route, and returns the id in it.
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

// FindRoute returns the handler for a request, or nil if no route matches.
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

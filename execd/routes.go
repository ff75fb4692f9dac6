package main

// The routes (contract 3).
//
// Invariants
//   - A route is a method and the segments of a path; each must be equal.
//   - A path is cut at its slashes as it was sent, and then each segment is decoded once: an
//     encoded slash belongs to a segment, and never to two.
//   - One slash at the end does not count; an id is never empty.

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// requestPath is a path by its segments, which are decoded.
type requestPath []string

// splitPath cuts a path as it was sent. One that does not begin with a slash has no segments.
func splitPath(raw string) (requestPath, error) {
	rest, ok := strings.CutPrefix(raw, "/")
	if !ok {
		return nil, nil
	}
	path := requestPath(strings.Split(rest, "/"))
	for i, segment := range path {
		var err error
		if path[i], err = url.PathUnescape(segment); err != nil {
			return nil, err
		}
	}
	return path, nil
}

func (p requestPath) is(segments ...string) bool { return slices.Equal(p, segments) }

func (p requestPath) withoutLastSlash() requestPath {
	if last := len(p) - 1; last > 0 && p[last] == "" {
		return p[:last]
	}
	return p
}

// below returns the text of the path behind some segments, which begins with a slash if there
// is more; ok is false where they are others, or where a segment holds a slash itself.
func (p requestPath) below(segments ...string) (rest string, ok bool) {
	if len(p) < len(segments) || !p[:len(segments)].is(segments...) {
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

// routeTo is a route of a server; {} is a segment of its path that is an id.
type routeTo struct {
	method, path string
	handler      func(s *Server, id string) http.HandlerFunc
}

// routes are all but those of files and of isolated sessions, and the open ones.
var routes = []routeTo{
	{"POST", "/command", func(s *Server, _ string) http.HandlerFunc { return s.commands.run }},
	{"DELETE", "/command", func(s *Server, _ string) http.HandlerFunc { return s.interrupt }},
	{"GET", "/command/status/{}", func(s *Server, id string) http.HandlerFunc { return s.commands.statusOf(id) }},
	{"GET", "/command/{}/logs", func(s *Server, id string) http.HandlerFunc { return s.commands.logsOf(id) }},
	{"POST", "/session", func(s *Server, _ string) http.HandlerFunc { return s.sessions.create }},
	{"POST", "/session/{}/run", func(s *Server, id string) http.HandlerFunc { return s.sessions.run(id) }},
	{"DELETE", "/session/{}", func(s *Server, id string) http.HandlerFunc { return s.sessions.delete(id) }},
	{"POST", "/code", func(s *Server, _ string) http.HandlerFunc { return s.code.run }},
	{"DELETE", "/code", func(s *Server, _ string) http.HandlerFunc { return s.interrupt }},
	{"POST", "/code/context", func(s *Server, _ string) http.HandlerFunc { return s.code.create }},
	{"GET", "/code/contexts", func(s *Server, _ string) http.HandlerFunc { return s.code.list }},
	{"DELETE", "/code/contexts", func(s *Server, _ string) http.HandlerFunc { return s.code.deleteAll }},
	{"GET", "/code/contexts/{}", func(s *Server, id string) http.HandlerFunc { return s.code.get(id) }},
	{"DELETE", "/code/contexts/{}", func(s *Server, id string) http.HandlerFunc { return s.code.delete(id) }},
	{"POST", "/pty", func(s *Server, _ string) http.HandlerFunc { return s.terminals.create }},
	{"GET", "/pty/{}", func(s *Server, id string) http.HandlerFunc { return s.terminals.status(id) }},
	{"DELETE", "/pty/{}", func(s *Server, id string) http.HandlerFunc { return s.terminals.delete(id) }},
	{"GET", "/pty/{}/ws", func(s *Server, id string) http.HandlerFunc { return s.terminals.attach(id) }},
	{"GET", "/metrics", func(s *Server, _ string) http.HandlerFunc { return s.metrics.serve }},
	{"GET", "/metrics/watch", func(s *Server, _ string) http.HandlerFunc { return s.metrics.watch }},
}

// matches compares a path with that of the route, and returns the id in it.
func (r routeTo) matches(path requestPath) (id string, ok bool) {
	wanted := strings.Split(r.path, "/")[1:]
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

// route finds the handler of a request; nil where there is none.
func (s *Server) route(method string, path requestPath) http.HandlerFunc {
	for _, each := range routes {
		if each.method != method {
			continue
		}
		if id, ok := each.matches(path); ok {
			return each.handler(s, id)
		}
	}
	if rest, ok := path.below("v1", "isolated"); ok {
		return s.isolation.route(method, rest)
	}
	if rest, ok := path.below("v1", "filesystem"); ok {
		return s.routeAs(method, rest)
	}
	if rest, ok := path.below(); ok {
		return s.files.route(method, rest)
	}
	return nil
}

// routeAs finds the handler of a file route with an identity.
func (s *Server) routeAs(method, rest string) http.HandlerFunc {
	chosen, route, ok, err := splitIdentity(rest)
	if !ok || s.files.route(method, route) == nil {
		return nil
	}
	return func(w http.ResponseWriter, r *http.Request) {
		if err != nil {
			writeError(w, err)
			return
		}
		s.identities.serve(w, r, chosen, route)
	}
}

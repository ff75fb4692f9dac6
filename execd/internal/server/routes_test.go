package server

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/testkit"
)

// everyRoute is the endpoint list of the contract; {} stands for an id that does not exist.
var everyRoute = []string{
	"GET /metrics", "GET /metrics/watch",
	"POST /command", "DELETE /command", "GET /command/status/{}", "GET /command/{}/logs",
	"POST /session", "POST /session/{}/run", "DELETE /session/{}",
	"POST /code", "DELETE /code", "POST /code/context", "GET /code/contexts", "DELETE /code/contexts",
	"GET /code/contexts/{}", "DELETE /code/contexts/{}",
	"GET /files/info", "GET /files/search", "GET /files/download",
	"POST /files/upload", "POST /files/mv", "POST /files/permissions", "POST /files/replace", "DELETE /files",
	"GET /directories/list", "POST /directories", "DELETE /directories",
	"GET /v1/filesystem/{}/{}/files/info", "POST /v1/filesystem/{}/{}/files/mv", "POST /v1/filesystem/{}/{}/directories", "DELETE /v1/filesystem/{}/{}/directories",
	"GET /v1/isolated/capabilities", "POST /v1/isolated/session", "GET /v1/isolated/sessions", "GET /v1/isolated/session/{}", "DELETE /v1/isolated/session/{}",
	"POST /v1/isolated/session/{}/run", "GET /v1/isolated/session/{}/runs/{}", "GET /v1/isolated/session/{}/runs/{}/logs",
	"GET /v1/isolated/session/{}/diff", "POST /v1/isolated/session/{}/commit",
	"GET /v1/isolated/session/{}/files/info", "DELETE /v1/isolated/session/{}/files", "POST /v1/isolated/session/{}/directories", "DELETE /v1/isolated/session/{}/directories",
	"POST /pty", "GET /pty/{}", "DELETE /pty/{}", "GET /pty/{}/ws",
}

// routed reports whether a request reaches a handler.
func (f *fixture) routed(method, path string) bool {
	f.T.Helper()
	response := f.Do(method, path, http.NoBody)
	defer response.Body.Close()
	if response.StatusCode >= 300 && response.StatusCode < 400 {
		f.T.Errorf("%s %s is redirected", method, path)
	}
	if response.StatusCode != http.StatusNotFound || response.Header.Get("Content-Type") != "text/plain" {
		return true
	}
	if body, _ := io.ReadAll(response.Body); method != http.MethodHead && string(body) != "404 page not found" {
		f.T.Errorf("%s %s is answered %q", method, path, body)
	}
	return false
}

func TestARouteIsOneMethodAndOnePath(t *testing.T) {
	f := newFixture(t)
	known := map[string]bool{}
	for _, route := range everyRoute {
		known[route] = true
	}
	check := func(expected bool, method, path string) {
		t.Helper()
		path = strings.ReplaceAll(path, "{}", "none")
		if actual := f.routed(method, path); actual != expected {
			t.Errorf("%s %s reaches a handler: %t", method, path, actual)
		}
	}
	for _, route := range everyRoute {
		method, path, _ := strings.Cut(route, " ")
		check(true, method, path)
		check(true, method, path+"/")
		check(true, method, path[:len(path)-1]+fmt.Sprintf("%%%X", path[len(path)-1]))
		check(false, method, path+"//")
		check(false, method, "/"+path)
		check(false, method, path+"/./.")
		check(false, method, path+"/../"+path[strings.LastIndexByte(path, '/')+1:])
		check(false, method, strings.ToUpper(path[:2])+path[2:])
		if !strings.HasSuffix(path, "{}") {
			check(false, method, path+"%2F")
		}
		check(false, method, "/%2F"+path[1:])
		for at := 1; at < len(path); at++ { // remove, encode and double each slash; extend each segment
			if path[at] != '/' {
				continue
			}
			check(false, method, path[:at]+"//"+path[at+1:])
			if path[at-1] == '}' || path[at+1] == '{' { // the result would be a longer id
				continue
			}
			check(false, method, path[:at]+"%2F"+path[at+1:])
			check(false, method, path[:at]+path[at+1:])
			check(false, method, path[:at]+"x"+path[at:])
		}
		for _, other := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND", strings.ToLower(method)} {
			check(known[other+" "+path], other, path)
		}
	}
	for _, path := range []string{"/pty/%7B%7D/x", "/command//logs", "/pty//ws", "/session//run", "/v1", "/v1/filesystem", "/v1/isolated", "/v1/isolated/session//run", "/v1/isolated/session//runs/x", "/v1/isolated/session//files/info", "/v1/isolated/session//diff", "/v1/isolated/session//commit", "/v1/isolated/session/x/runs//logs", "/internal"} {
		check(false, "GET", path)
		check(false, "POST", path)
	}
}

func TestAnIdIsDecodedOnce(t *testing.T) {
	f := newFixture(t)
	for sent, id := range map[string]string{
		"a%2Fb": "a/b", "%252F": "%2F", "%2561": "%61", "a+b": "a+b", "%7B%7D": "{}", "..%2F..": "../..", "%20": " ", "%E2%82%AC": "€",
	} {
		for route, text := range map[string]string{
			"GET /pty/{}": "pty session ? not found", "DELETE /session/{}": "session ? not found",
			"GET /command/status/{}": "command not found: ?",
		} {
			method, path, _ := strings.Cut(route, " ")
			status, body := f.Call(method, strings.Replace(path, "{}", sent, 1), "")
			testkit.Equal(t, 404, status)
			if expected := strings.Replace(text, "?", id, 1); !strings.Contains(body, `"message":"`+expected+`"`) {
				t.Errorf("%s of %s: %s", route, sent, body)
			}
		}
	}
}

func TestAPortHasOneSpelling(t *testing.T) {
	f := newFixture(t)
	_, port, _ := strings.Cut(strings.TrimPrefix(f.URL, "http://"), ":")
	control, _ := f.Call("GET", "/proxy/"+port+"/ping", "")
	testkit.Equal(t, 200, control)
	for _, spelling := range []string{"0" + port, "00000" + port, "+" + port, "-" + port, port + ".", "%3" + port[:1] + port[1:], " " + port, "0x50", ""} {
		for _, own := range []string{spelling, strings.Replace(spelling, port, fmt.Sprint(testPort), 1)} {
			status, _ := f.Call("GET", "/proxy/"+(&url.URL{Path: own}).EscapedPath()+"/ping", "")
			testkit.Equal(t, own+" 400", own+" "+fmt.Sprint(status))
		}
	}
}

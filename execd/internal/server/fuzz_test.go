package server

// Fuzz tests of the parsers that read input of a hostile image, client or session. The seeds run with every `go test`;
// `./run test` also runs some of the fuzz tests for a short time.

import (
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
)

func FuzzToken(f *testing.F) {
	f.Add("secret", "secret", "x")
	f.Add("", "", "")
	f.Fuzz(func(t *testing.T, token, first, second string) {
		auth, err := NewAuth(HashToken(token), false)
		if err != nil {
			t.Fatal(err)
		}
		request := &http.Request{Header: http.Header{httpx.TokenHeader: {first}}}
		if auth.Allows(request) != (first == token) {
			t.Fatalf("%q for %q", first, token)
		}
		request.Header[httpx.TokenHeader] = []string{token, second}
		if auth.Allows(request) {
			t.Fatal("two tokens")
		}
		if made, err := NewAuth(first, false); err == nil && len(first) != 64 || made.open {
			t.Fatalf("%q is no hash", first)
		}
	})
}

func FuzzPaths(f *testing.F) {
	for _, path := range []string{"/proxy/44772/ping", "/v1/filesystem/0/+1/files", "/proxy/80/%2e%2e/x", "//ping", "/v1/isolated/session/../x/run", "/%zz", "/proxy/00080/"} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		if !strings.HasPrefix(path, "/") {
			return
		}
		launcher := &process.Launcher{Env: environ.Fixed(nil), Log: log.New(io.Discard, "", 0), Reaper: &process.Reaper{}}
		server := New(Options{Binding: &Binding{}, Port: testPort, Log: launcher.Log, Launcher: launcher})
		request := &http.Request{Method: http.MethodGet, RequestURI: path, Header: http.Header{}}
		answer := httptest.NewRecorder()
		server.ServeHTTP(answer, request) // the request has no token
		if open := answer.Code == 200; open && strings.TrimRight(server.withoutOwnProxy(rawPath(request)), "") != "/ping" && answer.Body.Len() > 0 {
			t.Fatalf("%q answered %d", path, answer.Code)
		}
		if answer.Code < 200 || answer.Code >= 300 && answer.Code < 400 {
			t.Fatalf("%q answered %d", path, answer.Code)
		}
	})
}

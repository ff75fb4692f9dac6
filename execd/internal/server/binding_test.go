package server

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/testkit"
)

func TestInitIsThereOnlyWhenAskedForAndBindsTokenAndVariables(t *testing.T) {
	f := newFixture(t)
	status, _ := f.Call("POST", "/internal/init", "{}")
	testkit.Equal(t, 404, status)
	status, _ = f.Call("GET", "/ready", "", httpx.TokenHeader, "")
	testkit.Equal(t, 503, status)
	f.server.binding.SetReady(true)
	status, body := f.Call("GET", "/ready", "", httpx.TokenHeader, "")
	testkit.Equal(t, `200 {"generation":0,"ready":true}`, fmt.Sprint(status, " ", body))

	f.server.binding, _ = NewBinding(Auth{}, true, "")
	status, _ = f.Call("GET", "/ping", "")
	testkit.Equal(t, 200, status)
	for _, route := range []string{"GET /metrics", "GET /ready", "GET /proxy/80/"} {
		method, path, _ := strings.Cut(route, " ")
		status, _ = f.Call(method, path, "")
		testkit.Equal(t, 503, status)
	}
	good := `{"sandboxId":"new","generation":%d,"accessTokenHash":"sha256:` + HashToken("fresh") + `","envs":{"BOUND":"b"}}`
	for _, bad := range []string{
		`{}`, `{"sandboxId":"x","accessTokenHash":"` + HashToken("fresh") + `"}`, strings.Replace(good, "BOUND", "EXECD_ACCESS_TOKEN", 1),
		strings.Replace(good, `"envs"`, `"entrypointPolicy":"perhaps","envs"`, 1),
		strings.Replace(good, `"envs"`, `"lifecycle":{"preStart":{"command":[]}},"envs"`, 1),
	} {
		status, body = f.Call("POST", "/internal/init", strings.Replace(bad, "%d", "1", 1))
		testkit.Equal(t, "400 "+body, fmt.Sprint(status, " ", body))
	}
	status, body = f.Call("POST", "/internal/init", fmt.Sprintf(good, 5))
	testkit.Equal(t, `200 {"generation":5,"sandboxId":"new"}`, fmt.Sprint(status, " ", body))
	status, _ = f.Call("GET", "/metrics", "") // with the former token
	testkit.Equal(t, 401, status)
	status, _ = f.Call("POST", "/internal/init", fmt.Sprintf(good, 6)) // without the new token
	testkit.Equal(t, 401, status)
	status, _ = f.Call("POST", "/internal/init", fmt.Sprintf(good, 4), httpx.TokenHeader, "fresh")
	testkit.Equal(t, 409, status)
	status, body = f.Call("POST", "/command", `{"command":"echo $BOUND $OPENSANDBOX_ID $FIXTURE"}`, httpx.TokenHeader, "fresh")
	testkit.Equal(t, true, status == 200 && strings.Contains(body, `"b new daemon\n"`))
	_, body = f.Call("POST", "/session", "{}", httpx.TokenHeader, "fresh")
	status, _ = f.Call("POST", "/internal/init", strings.Replace(fmt.Sprintf(good, 6), "BOUND", "OTHER", 1), httpx.TokenHeader, "fresh")
	testkit.Equal(t, 200, status)
	id := body[len(`{"session_id":"`) : len(body)-2]
	status, _ = f.Call("DELETE", "/session/"+id, "", httpx.TokenHeader, "fresh") // ended by the init
	testkit.Equal(t, 404, status)
	_, body = f.Call("POST", "/command", `{"command":"echo ${BOUND-gone} $OTHER"}`, httpx.TokenHeader, "fresh")
	testkit.Equal(t, true, strings.Contains(body, `"gone b\n"`))
}

func TestAnAwaitedInitBeginsOnceWithItsEntrypointAndHooksAndIsGoneThen(t *testing.T) {
	f := newFixture(t)
	auth, err := NewAuth(HashToken(testkit.Token), false)
	testkit.Equal(t, nil, err)
	begun := make(chan Beginning, 2)
	f.server.begin, f.server.entrypoint = func(first Beginning) { begun <- first }, []string{"usual"}
	f.server.binding, _ = NewBinding(auth, true, "")
	status, _ := f.Call("GET", "/metrics", "")
	testkit.Equal(t, 503, status)
	good := `{"sandboxId":"new","generation":1,"accessTokenHash":"sha256:` + HashToken("fresh") + `","envs":{"BOUND":"b"},"entrypoint":["given","b"]}`
	status, _ = f.Call("POST", "/internal/init", good, httpx.TokenHeader, "wrong")
	testkit.Equal(t, 401, status)
	for _, bad := range []string{`[]`, `[""]`, `["a","b\u0000"]`, `[` + strings.Repeat(`"a",`, 256) + `"a"]`} {
		status, _ = f.Call("POST", "/internal/init", strings.Replace(good, `["given","b"]`, bad, 1))
		if bad != `[]` {
			testkit.Equal(t, 400, status)
			continue
		}
		testkit.Equal(t, 200, status)
		testkit.Equal(t, "[usual]", fmt.Sprint((<-begun).Entrypoint))
		f.server.begun = false
		f.server.binding, _ = NewBinding(auth, true, "")
	}
	testkit.Equal(t, 0, len(begun))
	status, body := f.Call("POST", "/internal/init", good)
	testkit.Equal(t, `200 {"generation":1,"sandboxId":"new"}`, fmt.Sprint(status, " ", body))
	testkit.Equal(t, "[given b]", fmt.Sprint((<-begun).Entrypoint))
	status, _ = f.Call("GET", "/ready", "") // the entrypoint was not started yet
	testkit.Equal(t, 503, status)
	f.server.binding.SetReady(true)
	status, _ = f.Call("GET", "/ready", "")
	testkit.Equal(t, 200, status)
	status, _ = f.Call("GET", "/metrics", "", httpx.TokenHeader, "fresh")
	testkit.Equal(t, 200, status)
	for _, token := range []string{testkit.Token, "fresh"} {
		status, _ = f.Call("POST", "/internal/init", good, httpx.TokenHeader, token)
		testkit.Equal(t, true, status == 404 || status == 401)
	}
	testkit.Equal(t, 0, len(begun))
}

func TestTheFilesOfAnAwaitedInitExistBeforeTheEntrypointBegins(t *testing.T) {
	f := newFixture(t)
	auth, err := NewAuth(HashToken(testkit.Token), false)
	testkit.Equal(t, nil, err)
	home := t.TempDir()
	begun := 0
	f.server.begin = func(Beginning) {
		begun++
		info, err := os.Stat(home + "/made/.netrc")
		testkit.Equal(t, nil, err)
		testkit.Equal(t, "-rw-------", info.Mode().String())
	}
	f.server.binding, _ = NewBinding(auth, true, "")
	body := func(path string) string {
		return `{"sandboxId":"new","generation":1,"accessTokenHash":"sha256:` + HashToken(testkit.Token) + `","envs":{"HOME":"` + home +
			`"},"files":[{"path":"` + path + `","content":"password a\n"}]}`
	}
	status, _ := f.Call("POST", "/internal/init", body("/proc/none/.netrc")) // cannot be written: nothing begins
	testkit.Equal(t, "422 0", fmt.Sprint(status, " ", begun))
	status, _ = f.Call("POST", "/internal/init", body("~/made/.netrc"))
	testkit.Equal(t, "200 1", fmt.Sprint(status, " ", begun))
	testkit.Equal(t, "password a\n", string(testkit.MustRead(t, home+"/made/.netrc")))
	status, _ = f.Call("POST", "/internal/init", body("~/again")) // none is awaited any more
	testkit.Equal(t, 404, status)
	_, err = os.Stat(home + "/again")
	testkit.Equal(t, true, os.IsNotExist(err))
}

func TestAnEntrypointIsRefusedWhereNoneIsAwaited(t *testing.T) {
	f := newFixture(t)
	f.server.binding, _ = NewBinding(Auth{}, true, "")
	good := `{"sandboxId":"new","generation":1,"accessTokenHash":"sha256:` + HashToken("fresh") + `","entrypoint":["given"]}`
	status, _ := f.Call("POST", "/internal/init", good)
	testkit.Equal(t, 400, status)
	status, _ = f.Call("POST", "/internal/init", strings.Replace(good, `"entrypoint":["given"]`, `"files":[{"path":"/a","content":""}]`, 1))
	testkit.Equal(t, 400, status)
}

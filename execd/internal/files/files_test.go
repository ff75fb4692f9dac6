package files

import (
	"bytes"
	"encoding/json"
	"fmt"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

type fixture struct {
	*testkit.Client
	files      *Files
	identities *Identities
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	launcher, _ := testhost.Launcher(t)
	f := &fixture{
		files:      New(launcher.Env, launcher.Accounts, "/", 0o022),
		identities: NewIdentities(launcher.Reaper, launcher.Accounts, launcher.Log, testhost.Program(t)),
	}
	f.Client = testkit.NewClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		route := f.files.Route
		path, ok := strings.CutPrefix(r.URL.Path, "/v1/filesystem")
		if ok {
			route = f.identities.Route
		}
		handler := route(r.Method, strings.TrimSuffix(path, "/"))
		if handler == nil {
			httpx.NotFound(w)
			return
		}
		handler(w, r)
	}))
	return f
}

func (f *fixture) uploadFile(path, content, extra string) (int, string) {
	f.T.Helper()
	return f.uploadAs("", path, content, extra)
}

func (f *fixture) uploadAs(prefix, path, content, extra string) (int, string) {
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	metadata, _ := form.CreateFormFile("metadata", "metadata")
	fmt.Fprintf(metadata, `{"path":%q%s}`, path, extra)
	file, _ := form.CreateFormFile("file", path)
	file.Write([]byte(content))
	form.Close()
	return f.Call("POST", prefix+"/files/upload", body.String(), "Content-Type", form.FormDataContentType())
}

func TestUploadCreatesParentsAndSetsMode(t *testing.T) {
	f := newFixture(t)
	path := filepath.Join(t.TempDir(), "a/b/$5 ü.txt")
	status, body := f.uploadFile(path, "content", `,"owner":null,"group":null,"mode":640`)
	testkit.Equal(t, "", body)
	testkit.Equal(t, 200, status)
	testkit.Equal(t, "content", testkit.MustRead(t, path))
	_, answer := f.Call("GET", "/files/info?path="+url.QueryEscape(path), "")
	var infos map[string]fileInfo
	if err := json.Unmarshal([]byte(answer), &infos); err != nil {
		t.Fatal(err)
	}
	testkit.Equal(t, 640, infos[path].Mode)
	testkit.Equal(t, "file", infos[path].Type)
	testkit.Equal(t, int64(7), infos[path].Size)
}

func TestUploadKeepsModeFollowsLinksAndLeavesNoTemporaryFile(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	target := directory + "/target"
	os.WriteFile(target, []byte("a much longer old content"), 0o600)
	syscall.Chmod(target, 0o4711)
	os.Symlink("target", directory+"/link")
	status, _ := f.uploadFile(directory+"/link", "new", "")
	testkit.Equal(t, 200, status)
	testkit.Equal(t, "new", testkit.MustRead(t, target))
	info, _ := os.Stat(target)
	testkit.Equal(t, uint32(0o4711), info.Sys().(*syscall.Stat_t).Mode&0o7777)
	os.Symlink("fresh", directory+"/dangling")
	status, _ = f.uploadFile(directory+"/dangling", "x", "")
	testkit.Equal(t, 200, status)
	info, _ = os.Stat(directory + "/fresh")
	testkit.Equal(t, os.FileMode(0o755), info.Mode())
	entries, _ := os.ReadDir(directory)
	testkit.Equal(t, 4, len(entries))
}

func TestUploadNeverReplacesADevice(t *testing.T) {
	f := newFixture(t)
	fifo := t.TempDir() + "/fifo"
	syscall.Mkfifo(fifo, 0o600)
	status, _ := f.uploadFile(fifo, "x", "")
	testkit.Equal(t, 500, status)
	status, _ = f.Call("GET", "/files/download?path="+fifo, "")
	testkit.Equal(t, 400, status)
}

func TestUploadErrors(t *testing.T) {
	f := newFixture(t)
	part := func(name, content string) string {
		return "--B\r\nContent-Disposition: form-data; name=\"" + name + "\"; filename=\"x\"\r\n\r\n" + content + "\r\n"
	}
	good := part("metadata", `{"path":"`+t.TempDir()+`/x"}`)
	for _, c := range []struct{ body, code string }{
		{"--B--\r\n", httpx.CodeInvalidFile},
		{good + "--B--\r\n", httpx.CodeInvalidContent},
		{good + good + part("file", "x") + "--B--\r\n", httpx.CodeInvalidFile},
		{part("file", "x") + "--B--\r\n", httpx.CodeInvalidMetadata},
		{part("metadata", `{"path":""}`) + part("file", "x") + "--B--\r\n", httpx.CodeInvalidMetadata},
		{part("metadata", `{`) + part("file", "x") + "--B--\r\n", httpx.CodeInvalidMetadata},
		{part("metadata", `{"path":"/tmp/x","mode":888}`) + part("file", "x") + "--B--\r\n", httpx.CodeInvalidBody},
		{good + "--B\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\ncut", httpx.CodeRuntime},
	} {
		_, body := f.Call("POST", "/files/upload", c.body, "Content-Type", "multipart/form-data; boundary=B")
		if !strings.Contains(body, `"code":"`+c.code+`"`) {
			t.Fatalf("expected %s, got %s for %q", c.code, body, c.body)
		}
	}
}

func TestANameOfControlCharactersIsServedEverywhereButInAHeader(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	name := "a\t\x01\x1b[31m\x7f\r\n b"
	path := directory + "/" + name
	os.WriteFile(path, []byte("content"), 0o644)
	at := "?path=" + url.QueryEscape(path)
	status, answer := f.Call("GET", "/files/download"+at, "")
	testkit.Equal(t, "200 content", fmt.Sprint(status, " ", answer))
	response := f.Do("GET", "/files/download"+at, nil)
	_, extended, _ := strings.Cut(response.Header.Get("Content-Disposition"), `attachment; filename="a___[31m___ b"; filename*=UTF-8''`)
	named, _ := url.PathUnescape(extended)
	testkit.Equal(t, name, named)
	encoded, _ := json.Marshal(path)
	for _, route := range []string{"/files/info" + at, "/directories/list?path=" + directory, "/files/search?path=" + directory} {
		_, answer := f.Call("GET", route, "")
		testkit.Equal(t, true, strings.Contains(answer, `"path":`+string(encoded)))
	}
	moved, _ := json.Marshal([]testkit.Object{{"src": path, "dest": path + "2"}})
	status, _ = f.Call("POST", "/files/mv", string(moved))
	testkit.Equal(t, 200, status)
	status, _ = f.Call("DELETE", "/files"+at+"2", "")
	testkit.Equal(t, 200, status)
	left, _ := os.ReadDir(directory)
	testkit.Equal(t, 0, len(left))
	broken := "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\x01b\"\r\n\r\nx\r\n--B--\r\n"
	status, answer = f.Call("POST", "/files/upload", broken, "Content-Type", "multipart/form-data; boundary=B")
	testkit.Equal(t, true, status == 400 && strings.Contains(answer, httpx.CodeInvalidFile) && strings.Contains(answer, "control character"))
}

func TestTheFilenameOfAPartIsIrrelevant(t *testing.T) {
	f := newFixture(t)
	for i, filename := range []string{"", `\"; name=\"metadata`, "\xff", "a;b=c", `x"; y="`} {
		path := fmt.Sprintf("%s/%d", t.TempDir(), i)
		body := "--B\r\nContent-Disposition: form-data; name=\"metadata\"\r\n\r\n{\"path\":\"" + path + "\"}\r\n" +
			"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"" + filename + "\"\r\n\r\ncontent\r\n--B--\r\n"
		status, answer := f.Call("POST", "/files/upload", body, "Content-Type", "multipart/form-data; boundary=B")
		testkit.Equal(t, "200 ", fmt.Sprint(status)+" "+answer)
		content, _ := os.ReadFile(path)
		testkit.Equal(t, "content", string(content))
	}
}

func TestDownloadRangesAndLines(t *testing.T) {
	f := newFixture(t)
	path := t.TempDir() + `/q"ü`
	os.WriteFile(path, []byte("one\ntwo\r\nthree\n\nfive"), 0o644)
	at := "/files/download?path=" + url.QueryEscape(path)
	for _, c := range []struct {
		query, header, body string
		status              int
	}{
		{"", "", "one\ntwo\r\nthree\n\nfive", 200},
		{"", "bytes=0-2", "one", 206},
		{"", "bytes=4-5,0-1", "tw", 206},
		{"", "bytes=16-99", "five", 206},
		{"", "bytes=-4", "five", 206},
		{"", "bytes=-99", "one\ntwo\r\nthree\n\nfive", 206},
		{"&offset=2", "", "two\nthree\n\nfive", 200},
		{"&offset=2&limit=2", "", "two\nthree", 200},
		{"&limit=4", "", "one\ntwo\nthree\n", 200},
		{"&offset=6", "", "", 200},
	} {
		status, body := f.Call("GET", at+c.query, "", "Range", c.header)
		testkit.Equal(t, c.status, status)
		testkit.Equal(t, c.body, body)
	}
	for query, header := range map[string]string{"&offset=0": "", "&limit=x": "", "&offset=1": "bytes=0-1"} {
		status, _ := f.Call("GET", at+query, "", "Range", header)
		testkit.Equal(t, 400, status)
	}
	for _, header := range []string{"bytes=99-", "bytes=3-1", "lines=1-2", "bytes=x", "bytes=-0", "bytes=+1-2"} {
		response := f.Do("GET", at, nil, "Range", header)
		testkit.Equal(t, 416, response.StatusCode)
		testkit.Equal(t, "bytes */20", response.Header.Get("Content-Range"))
	}
	response := f.Do("GET", at, nil)
	testkit.Equal(t, `attachment; filename="q\"_"; filename*=UTF-8''q%22%C3%BC`, response.Header.Get("Content-Disposition"))
	testkit.Equal(t, "bytes", response.Header.Get("Accept-Ranges"))
	response = f.Do("GET", at, nil, "If-Modified-Since", response.Header.Get("Last-Modified"))
	testkit.Equal(t, 304, response.StatusCode)
	for query, expected := range map[string]int{"": 400, "?path=/no/such": 404, "?path=/etc": 400} {
		status, _ := f.Call("GET", "/files/download"+query, "")
		testkit.Equal(t, expected, status)
	}
}

func TestLineReadsKeepLoneCarriageReturnsAcrossBuffers(t *testing.T) {
	for _, length := range []int{65534, 65535, 65536, 65537} {
		text := strings.Repeat("x", length) + "\r\r\nlast\r"
		var out bytes.Buffer
		if err := copyLines(&out, strings.NewReader(text), 1, 0); err != nil {
			t.Fatal(err)
		}
		testkit.Equal(t, strings.Repeat("x", length)+"\r\nlast\r", out.String())
	}
}

func TestDeleteIsIdempotentAndGuarded(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	os.Mkdir(directory+"/d", 0o755)
	os.Symlink("nowhere", directory+"/dangling")
	os.WriteFile(directory+"/file", nil, 0o600)
	for path, expected := range map[string]int{
		"/files?path=" + directory + "/missing": 200, "/files": 200, "/files?path=" + directory + "/d": 500, "/files?path=": 400,
		"/files?path=" + directory + "/dangling": 200, "/directories?path=/": 400, "/directories?path=": 400,
		"/directories?path=/tmp/..": 400, "/directories?path=" + directory + "/missing": 200,
		"/directories?path=" + directory + "/file/below": 200, "/files?path=" + directory + "/file/below": 200,
	} {
		status, _ := f.Call("DELETE", path, "")
		testkit.Equal(t, path+fmt.Sprint(expected), path+fmt.Sprint(status))
	}
	status, _ := f.Call("DELETE", "/directories?path="+directory, "")
	testkit.Equal(t, 200, status)
	_, err := os.Lstat(directory)
	testkit.Equal(t, true, os.IsNotExist(err))
}

func TestDirectoriesAreMadeWithModeAndLeftAloneIfTheyExist(t *testing.T) {
	f := newFixture(t)
	path := t.TempDir() + "/x/y"
	for _, mode := range []string{"1777", "700"} {
		status, _ := f.Call("POST", "/directories", `{"`+path+`":{"mode":`+mode+`,"owner":null,"group":""}}`)
		testkit.Equal(t, 200, status)
		_, info := f.Call("GET", "/files/info?path="+path, "")
		testkit.Equal(t, true, strings.Contains(info, `"type":"directory"`) && strings.Contains(info, `"mode":1777`))
	}
}

func TestPermissions(t *testing.T) {
	f := newFixture(t)
	path := t.TempDir() + "/x"
	os.WriteFile(path, nil, 0o600)
	for body, expected := range map[string]int{
		`{"` + path + `":{"mode":4755}}`: 200, `{"` + path + `":{"mode":798}}`: 400, `{"/no/such":{"mode":600}}`: 500,
		`{"` + path + `":{"owner":"no-such-user"}}`: 500, `[]`: 400,
	} {
		status, _ := f.Call("POST", "/files/permissions", body)
		testkit.Equal(t, body+fmt.Sprint(expected), body+fmt.Sprint(status))
	}
	info, _ := os.Stat(path)
	testkit.Equal(t, uint32(0o4755), info.Sys().(*syscall.Stat_t).Mode&0o7777)
}

func TestMoveCreatesParentsAndNeverOverwrites(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	os.WriteFile(directory+"/a", []byte("a"), 0o600)
	move := func(from, to string) int {
		status, _ := f.Call("POST", "/files/mv", fmt.Sprintf(`[{"src":%q,"dest":%q}]`, directory+from, directory+to))
		return status
	}
	testkit.Equal(t, 200, move("/a", "/n/m/b"))
	testkit.Equal(t, "a", testkit.MustRead(t, directory+"/n/m/b"))
	testkit.Equal(t, 404, move("/a", "/c"))
	os.WriteFile(directory+"/a", nil, 0o600)
	testkit.Equal(t, 500, move("/a", "/n/m/b"))
	testkit.Equal(t, 500, move("/n", "/n/inside"))
	testkit.Equal(t, 200, move("/n", "/moved"))
}

func TestMoveAcrossDevicesCopiesTheTree(t *testing.T) {
	other, err := os.MkdirTemp("/dev/shm", "execd-test-")
	if err != nil {
		t.Skip("no second file system")
	}
	t.Cleanup(func() { os.RemoveAll(other) })
	from := t.TempDir() + "/tree"
	os.MkdirAll(from+"/sub", 0o750)
	os.WriteFile(from+"/sub/file", []byte("x"), 0o640)
	os.Symlink("sub/file", from+"/link")
	if err := newFixture(t).files.moveOne(t.Context(), from, other+"/tree"); err != nil {
		t.Fatal(err)
	}
	testkit.Equal(t, "x", testkit.MustRead(t, other+"/tree/link"))
	_, err = os.Lstat(from)
	testkit.Equal(t, true, os.IsNotExist(err))
}

func TestReplaceCountsAndTouchesOnlyWhatMatches(t *testing.T) {
	f := newFixture(t)
	path := t.TempDir() + "/x"
	os.WriteFile(path, []byte(strings.Repeat("ab", 300000)+"aab"), 0o640)
	status, body := f.Call("POST", "/files/replace?verbose=true", `{"`+path+`":{"old":"ab","new":"c"}}`)
	testkit.Equal(t, 200, status)
	testkit.Equal(t, `{"`+path+`":{"replacedCount":300001}}`, body)
	testkit.Equal(t, strings.Repeat("c", 300000)+"ac", testkit.MustRead(t, path))
	before, _ := os.Stat(path)
	_, body = f.Call("POST", "/files/replace?verbose=true", `{"`+path+`":{"old":"none","new":"c"}}`)
	testkit.Equal(t, `{"`+path+`":{"replacedCount":0}}`, body)
	after, _ := os.Stat(path)
	testkit.Equal(t, true, os.SameFile(before, after))
	status, _ = f.Call("POST", "/files/replace", `{"`+path+`":{"old":"","new":"c"}}`)
	testkit.Equal(t, 400, status)
	status, _ = f.Call("POST", "/files/replace", `{"/no/such":{"old":"a","new":"c"}}`)
	testkit.Equal(t, 404, status)
}

func TestListIsPreorderAndSearchMatchesBaseNames(t *testing.T) {
	f := newFixture(t)
	root := t.TempDir()
	os.MkdirAll(root+"/b/c", 0o755)
	for _, name := range []string{"/a.txt", "/b/.hidden.txt", "/b/c/deep.md", "/z"} {
		os.WriteFile(root+name, nil, 0o644)
	}
	os.Symlink("b", root+"/link")
	names := func(path string) []string {
		status, body := f.Call("GET", path, "")
		testkit.Equal(t, 200, status)
		var infos []fileInfo
		if err := json.Unmarshal([]byte(body), &infos); err != nil {
			t.Fatal(body)
		}
		list := []string{}
		for _, info := range infos {
			list = append(list, strings.TrimPrefix(info.Path, root)+":"+info.Type[:1])
		}
		return list
	}
	list := "/directories/list?path=" + root
	testkit.Equal(t, []string{"/a.txt:f", "/b:d", "/link:s", "/z:f"}, names(list))
	testkit.Equal(t, []string{}, names(list+"&depth=0"))
	testkit.Equal(t, []string{"/a.txt:f", "/b:d", "/b/.hidden.txt:f", "/b/c:d", "/b/c/deep.md:f", "/link:s", "/z:f"}, names(list+"&depth=9"))
	search := "/files/search?path=" + root + "&pattern="
	testkit.Equal(t, []string{"/a.txt:f", "/b/.hidden.txt:f"}, names(search+"*.txt"))
	testkit.Equal(t, []string{"/a.txt:f", "/b/c/deep.md:f", "/z:f"}, names(search+url.QueryEscape("**/{[a-d]*.{txt,md},?}")))
	testkit.Equal(t, 5, len(names(search)))
	for path, expected := range map[string]int{
		list + "/missing": 404, list + "&depth=-1": 400, list + "/link": 400, list + "/z": 400, "/directories/list": 400,
		search + "%5B": 400, "/files/search?path=/no/such": 404,
	} {
		status, _ := f.Call("GET", path, "")
		testkit.Equal(t, path+fmt.Sprint(expected), path+fmt.Sprint(status))
	}
}

func FuzzGlobEndsAndStarMatchesAll(f *testing.F) {
	f.Add("{a,b{c,d}}[^x-z]*?\\*", "bc1*")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		glob, err := CompileGlob(pattern)
		if err == nil {
			glob.Match(name)
		}
		all, _ := CompileGlob("**")
		testkit.Equal(t, true, all.Match(name))
	})
}

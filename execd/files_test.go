package main

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
)

type filesFixture struct {
	*client
	files      *Files
	identities *Identities
}

func newFilesFixture(t *testing.T) *filesFixture {
	t.Helper()
	launcher, _ := testLauncher(t)
	f := &filesFixture{
		files:      NewFiles(launcher.env, launcher.accounts, "/", 0o022),
		identities: NewIdentities(launcher.reaper, launcher.accounts, launcher.log, testProgram(t)),
	}
	f.client = newClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		route := f.files.route
		path, ok := strings.CutPrefix(r.URL.Path, "/v1/filesystem")
		if ok {
			route = f.identities.route
		}
		handler := route(r.Method, strings.TrimSuffix(path, "/"))
		if handler == nil {
			notFound(w)
			return
		}
		handler(w, r)
	}))
	return f
}

func (f *filesFixture) uploadFile(path, content, extra string) (int, string) {
	f.t.Helper()
	return f.uploadAs("", path, content, extra)
}

func (f *filesFixture) uploadAs(prefix, path, content, extra string) (int, string) {
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	metadata, _ := form.CreateFormFile("metadata", "metadata")
	fmt.Fprintf(metadata, `{"path":%q%s}`, path, extra)
	file, _ := form.CreateFormFile("file", path)
	file.Write([]byte(content))
	form.Close()
	return f.call("POST", prefix+"/files/upload", body.String(), "Content-Type", form.FormDataContentType())
}

func TestUploadCreatesParentsAndSetsMode(t *testing.T) {
	f := newFilesFixture(t)
	path := filepath.Join(t.TempDir(), "a/b/$5 ü.txt")
	status, body := f.uploadFile(path, "content", `,"owner":null,"group":null,"mode":640`)
	equal(t, "", body)
	equal(t, 200, status)
	equal(t, "content", mustRead(t, path))
	_, answer := f.call("GET", "/files/info?path="+url.QueryEscape(path), "")
	var infos map[string]fileInfo
	if err := json.Unmarshal([]byte(answer), &infos); err != nil {
		t.Fatal(err)
	}
	equal(t, 640, infos[path].Mode)
	equal(t, "file", infos[path].Type)
	equal(t, int64(7), infos[path].Size)
}

func TestUploadKeepsModeFollowsLinksAndLeavesNoTemporaryFile(t *testing.T) {
	f := newFilesFixture(t)
	directory := t.TempDir()
	target := directory + "/target"
	os.WriteFile(target, []byte("a much longer old content"), 0o600)
	syscall.Chmod(target, 0o4711)
	os.Symlink("target", directory+"/link")
	status, _ := f.uploadFile(directory+"/link", "new", "")
	equal(t, 200, status)
	equal(t, "new", mustRead(t, target))
	info, _ := os.Stat(target)
	equal(t, uint32(0o4711), info.Sys().(*syscall.Stat_t).Mode&0o7777)
	os.Symlink("fresh", directory+"/dangling")
	status, _ = f.uploadFile(directory+"/dangling", "x", "")
	equal(t, 200, status)
	info, _ = os.Stat(directory + "/fresh")
	equal(t, os.FileMode(0o755), info.Mode())
	entries, _ := os.ReadDir(directory)
	equal(t, 4, len(entries))
}

func TestUploadNeverReplacesADevice(t *testing.T) {
	f := newFilesFixture(t)
	fifo := t.TempDir() + "/fifo"
	syscall.Mkfifo(fifo, 0o600)
	status, _ := f.uploadFile(fifo, "x", "")
	equal(t, 500, status)
	status, _ = f.call("GET", "/files/download?path="+fifo, "")
	equal(t, 400, status)
}

func TestUploadErrors(t *testing.T) {
	f := newFilesFixture(t)
	part := func(name, content string) string {
		return "--B\r\nContent-Disposition: form-data; name=\"" + name + "\"; filename=\"x\"\r\n\r\n" + content + "\r\n"
	}
	good := part("metadata", `{"path":"`+t.TempDir()+`/x"}`)
	for _, c := range []struct{ body, code string }{
		{"--B--\r\n", codeInvalidFile},
		{good + "--B--\r\n", codeInvalidContent},
		{good + good + part("file", "x") + "--B--\r\n", codeInvalidFile},
		{part("file", "x") + "--B--\r\n", codeInvalidMetadata},
		{part("metadata", `{"path":""}`) + part("file", "x") + "--B--\r\n", codeInvalidMetadata},
		{part("metadata", `{`) + part("file", "x") + "--B--\r\n", codeInvalidMetadata},
		{part("metadata", `{"path":"/tmp/x","mode":888}`) + part("file", "x") + "--B--\r\n", codeInvalidBody},
		{good + "--B\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\ncut", codeRuntime},
	} {
		_, body := f.call("POST", "/files/upload", c.body, "Content-Type", "multipart/form-data; boundary=B")
		if !strings.Contains(body, `"code":"`+c.code+`"`) {
			t.Fatalf("expected %s, got %s for %q", c.code, body, c.body)
		}
	}
}

func TestANameOfControlCharactersIsServedEverywhereButInAHeader(t *testing.T) {
	f := newFilesFixture(t)
	directory := t.TempDir()
	name := "a\t\x01\x1b[31m\x7f\r\n b"
	path := directory + "/" + name
	os.WriteFile(path, []byte("content"), 0o644)
	at := "?path=" + url.QueryEscape(path)
	status, answer := f.call("GET", "/files/download"+at, "")
	equal(t, "200 content", fmt.Sprint(status, " ", answer))
	response := f.do("GET", "/files/download"+at, nil)
	_, extended, _ := strings.Cut(response.Header.Get("Content-Disposition"), `attachment; filename="a___[31m___ b"; filename*=UTF-8''`)
	named, _ := url.PathUnescape(extended)
	equal(t, name, named)
	encoded, _ := json.Marshal(path)
	for _, route := range []string{"/files/info" + at, "/directories/list?path=" + directory, "/files/search?path=" + directory} {
		_, answer := f.call("GET", route, "")
		equal(t, true, strings.Contains(answer, `"path":`+string(encoded)))
	}
	moved, _ := json.Marshal([]object{{"src": path, "dest": path + "2"}})
	status, _ = f.call("POST", "/files/mv", string(moved))
	equal(t, 200, status)
	status, _ = f.call("DELETE", "/files"+at+"2", "")
	equal(t, 200, status)
	left, _ := os.ReadDir(directory)
	equal(t, 0, len(left))
	broken := "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\x01b\"\r\n\r\nx\r\n--B--\r\n"
	status, answer = f.call("POST", "/files/upload", broken, "Content-Type", "multipart/form-data; boundary=B")
	equal(t, true, status == 400 && strings.Contains(answer, codeInvalidFile) && strings.Contains(answer, "control character"))
}

func TestTheFilenameOfAPartIsIrrelevant(t *testing.T) {
	f := newFilesFixture(t)
	for i, filename := range []string{"", `\"; name=\"metadata`, "\xff", "a;b=c", `x"; y="`} {
		path := fmt.Sprintf("%s/%d", t.TempDir(), i)
		body := "--B\r\nContent-Disposition: form-data; name=\"metadata\"\r\n\r\n{\"path\":\"" + path + "\"}\r\n" +
			"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"" + filename + "\"\r\n\r\ncontent\r\n--B--\r\n"
		status, answer := f.call("POST", "/files/upload", body, "Content-Type", "multipart/form-data; boundary=B")
		equal(t, "200 ", fmt.Sprint(status)+" "+answer)
		content, _ := os.ReadFile(path)
		equal(t, "content", string(content))
	}
}

func TestDownloadRangesAndLines(t *testing.T) {
	f := newFilesFixture(t)
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
		status, body := f.call("GET", at+c.query, "", "Range", c.header)
		equal(t, c.status, status)
		equal(t, c.body, body)
	}
	for query, header := range map[string]string{"&offset=0": "", "&limit=x": "", "&offset=1": "bytes=0-1"} {
		status, _ := f.call("GET", at+query, "", "Range", header)
		equal(t, 400, status)
	}
	for _, header := range []string{"bytes=99-", "bytes=3-1", "lines=1-2", "bytes=x", "bytes=-0", "bytes=+1-2"} {
		response := f.do("GET", at, nil, "Range", header)
		equal(t, 416, response.StatusCode)
		equal(t, "bytes */20", response.Header.Get("Content-Range"))
	}
	response := f.do("GET", at, nil)
	equal(t, `attachment; filename="q\"_"; filename*=UTF-8''q%22%C3%BC`, response.Header.Get("Content-Disposition"))
	equal(t, "bytes", response.Header.Get("Accept-Ranges"))
	response = f.do("GET", at, nil, "If-Modified-Since", response.Header.Get("Last-Modified"))
	equal(t, 304, response.StatusCode)
	for query, expected := range map[string]int{"": 400, "?path=/no/such": 404, "?path=/etc": 400} {
		status, _ := f.call("GET", "/files/download"+query, "")
		equal(t, expected, status)
	}
}

func TestLineReadsKeepLoneCarriageReturnsAcrossBuffers(t *testing.T) {
	for _, length := range []int{65534, 65535, 65536, 65537} {
		text := strings.Repeat("x", length) + "\r\r\nlast\r"
		var out bytes.Buffer
		if err := copyLines(&out, strings.NewReader(text), 1, 0); err != nil {
			t.Fatal(err)
		}
		equal(t, strings.Repeat("x", length)+"\r\nlast\r", out.String())
	}
}

func TestDeleteIsIdempotentAndGuarded(t *testing.T) {
	f := newFilesFixture(t)
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
		status, _ := f.call("DELETE", path, "")
		equal(t, path+fmt.Sprint(expected), path+fmt.Sprint(status))
	}
	status, _ := f.call("DELETE", "/directories?path="+directory, "")
	equal(t, 200, status)
	_, err := os.Lstat(directory)
	equal(t, true, os.IsNotExist(err))
}

func TestDirectoriesAreMadeWithModeAndLeftAloneIfTheyExist(t *testing.T) {
	f := newFilesFixture(t)
	path := t.TempDir() + "/x/y"
	for _, mode := range []string{"1777", "700"} {
		status, _ := f.call("POST", "/directories", `{"`+path+`":{"mode":`+mode+`,"owner":null,"group":""}}`)
		equal(t, 200, status)
		_, info := f.call("GET", "/files/info?path="+path, "")
		equal(t, true, strings.Contains(info, `"type":"directory"`) && strings.Contains(info, `"mode":1777`))
	}
}

func TestPermissions(t *testing.T) {
	f := newFilesFixture(t)
	path := t.TempDir() + "/x"
	os.WriteFile(path, nil, 0o600)
	for body, expected := range map[string]int{
		`{"` + path + `":{"mode":4755}}`: 200, `{"` + path + `":{"mode":798}}`: 400, `{"/no/such":{"mode":600}}`: 500,
		`{"` + path + `":{"owner":"no-such-user"}}`: 500, `[]`: 400,
	} {
		status, _ := f.call("POST", "/files/permissions", body)
		equal(t, body+fmt.Sprint(expected), body+fmt.Sprint(status))
	}
	info, _ := os.Stat(path)
	equal(t, uint32(0o4755), info.Sys().(*syscall.Stat_t).Mode&0o7777)
}

func TestMoveCreatesParentsAndNeverOverwrites(t *testing.T) {
	f := newFilesFixture(t)
	directory := t.TempDir()
	os.WriteFile(directory+"/a", []byte("a"), 0o600)
	move := func(from, to string) int {
		status, _ := f.call("POST", "/files/mv", fmt.Sprintf(`[{"src":%q,"dest":%q}]`, directory+from, directory+to))
		return status
	}
	equal(t, 200, move("/a", "/n/m/b"))
	equal(t, "a", mustRead(t, directory+"/n/m/b"))
	equal(t, 404, move("/a", "/c"))
	os.WriteFile(directory+"/a", nil, 0o600)
	equal(t, 500, move("/a", "/n/m/b"))
	equal(t, 500, move("/n", "/n/inside"))
	equal(t, 200, move("/n", "/moved"))
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
	if err := newFilesFixture(t).files.moveOne(t.Context(), from, other+"/tree"); err != nil {
		t.Fatal(err)
	}
	equal(t, "x", mustRead(t, other+"/tree/link"))
	_, err = os.Lstat(from)
	equal(t, true, os.IsNotExist(err))
}

func TestReplaceCountsAndTouchesOnlyWhatMatches(t *testing.T) {
	f := newFilesFixture(t)
	path := t.TempDir() + "/x"
	os.WriteFile(path, []byte(strings.Repeat("ab", 300000)+"aab"), 0o640)
	status, body := f.call("POST", "/files/replace?verbose=true", `{"`+path+`":{"old":"ab","new":"c"}}`)
	equal(t, 200, status)
	equal(t, `{"`+path+`":{"replacedCount":300001}}`, body)
	equal(t, strings.Repeat("c", 300000)+"ac", mustRead(t, path))
	before, _ := os.Stat(path)
	_, body = f.call("POST", "/files/replace?verbose=true", `{"`+path+`":{"old":"none","new":"c"}}`)
	equal(t, `{"`+path+`":{"replacedCount":0}}`, body)
	after, _ := os.Stat(path)
	equal(t, true, os.SameFile(before, after))
	status, _ = f.call("POST", "/files/replace", `{"`+path+`":{"old":"","new":"c"}}`)
	equal(t, 400, status)
	status, _ = f.call("POST", "/files/replace", `{"/no/such":{"old":"a","new":"c"}}`)
	equal(t, 404, status)
}

func TestListIsPreorderAndSearchMatchesBaseNames(t *testing.T) {
	f := newFilesFixture(t)
	root := t.TempDir()
	os.MkdirAll(root+"/b/c", 0o755)
	for _, name := range []string{"/a.txt", "/b/.hidden.txt", "/b/c/deep.md", "/z"} {
		os.WriteFile(root+name, nil, 0o644)
	}
	os.Symlink("b", root+"/link")
	names := func(path string) []string {
		status, body := f.call("GET", path, "")
		equal(t, 200, status)
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
	equal(t, []string{"/a.txt:f", "/b:d", "/link:s", "/z:f"}, names(list))
	equal(t, []string{}, names(list+"&depth=0"))
	equal(t, []string{"/a.txt:f", "/b:d", "/b/.hidden.txt:f", "/b/c:d", "/b/c/deep.md:f", "/link:s", "/z:f"}, names(list+"&depth=9"))
	search := "/files/search?path=" + root + "&pattern="
	equal(t, []string{"/a.txt:f", "/b/.hidden.txt:f"}, names(search+"*.txt"))
	equal(t, []string{"/a.txt:f", "/b/c/deep.md:f", "/z:f"}, names(search+url.QueryEscape("**/{[a-d]*.{txt,md},?}")))
	equal(t, 5, len(names(search)))
	for path, expected := range map[string]int{
		list + "/missing": 404, list + "&depth=-1": 400, list + "/link": 400, list + "/z": 400, "/directories/list": 400,
		search + "%5B": 400, "/files/search?path=/no/such": 404,
	} {
		status, _ := f.call("GET", path, "")
		equal(t, path+fmt.Sprint(expected), path+fmt.Sprint(status))
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
		equal(t, true, all.Match(name))
	})
}

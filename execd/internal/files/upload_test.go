package files

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/testkit"
)

const formKind = "multipart/form-data; boundary=B"

func formPart(name, content string) string {
	return "--B\r\nContent-Disposition: form-data; name=\"" + name + "\"; filename=\"x\"\r\n\r\n" + content + "\r\n"
}

func TestAFileBeforeItsMetadataIsRefusedAndNothingIsWritten(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	data := func(name string) string { return formPart("metadata", `{"path":"`+directory+`/`+name+`"}`) }
	large := formPart("file", strings.Repeat("n", 4<<20))
	for _, c := range []struct{ form, code string }{
		{large + data("a/x"), httpx.CodeInvalidMetadata},
		{large + data("a/x") + data("a/y") + large, httpx.CodeInvalidMetadata},
		{large, httpx.CodeInvalidMetadata},
		{large + large + data("a/x"), httpx.CodeInvalidFile},
		{large + data("a/x") + data("a/y"), httpx.CodeInvalidFile},
		{large + formPart("metadata", "{") + data("a/x") + large, httpx.CodeInvalidMetadata},
	} {
		for _, prefix := range []string{"", asOther} {
			status, answer := f.Call("POST", prefix+"/files/upload", c.form+"--B--\r\n", "Content-Type", formKind)
			if status != 400 || !strings.Contains(answer, `"code":"`+c.code+`"`) {
				t.Fatalf("%s expected, %d %s for %.80q", c.code, status, answer, c.form)
			}
			onlyNames(t, directory)
		}
	}
	status, answer := f.Call("POST", "/files/upload", data("x")+formPart("file", "1")+formPart("file", "2")+"--B--\r\n", "Content-Type", formKind)
	testkit.Equal(t, true, status == 400 && strings.Contains(answer, httpx.CodeInvalidFile))
	testkit.Equal(t, "1", testkit.MustRead(t, directory+"/x")) // earlier files stay
}

func TestAFormHasABoundedNumberOfParts(t *testing.T) {
	f := newFixture(t)
	for _, name := range []string{"file", "metadata", "other"} {
		form := strings.Repeat(formPart(name, `{"path":"/proc/nothing"}`), uploadPartsLimit+1) + "--B--\r\n"
		status, answer := f.Call("POST", "/files/upload", form, "Content-Type", formKind)
		testkit.Equal(t, true, status == 400 && strings.Contains(answer, "too many"))
	}
}

// A client that sends the whole form before it reads receives the answer, and can use the connection again.
func TestARefusedUploadIsReadToItsEnd(t *testing.T) {
	f := newFixture(t)
	form := formPart("metadata", `{"path":""}`) + formPart("file", strings.Repeat("n", 32<<20)) + "--B--\r\n"
	connection, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
	mustDo(t, err)
	defer connection.Close()
	reader := bufio.NewReader(connection)
	for range 2 {
		_, err = fmt.Fprintf(connection, "POST /files/upload HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s",
			httpx.TokenHeader, testkit.Token, formKind, len(form), form)
		mustDo(t, err)
		response, err := http.ReadResponse(reader, nil)
		mustDo(t, err)
		answer, _ := io.ReadAll(response.Body)
		testkit.Equal(t, true, response.StatusCode == 400 && strings.Contains(string(answer), httpx.CodeInvalidMetadata))
	}
}

func TestARefusedUploadThatDoesNotEndIsAnsweredInTime(t *testing.T) {
	f := newFixture(t)
	f.files.limits.linger, f.files.limits.lingerIdle = 300*time.Millisecond, 100*time.Millisecond
	for _, endless := range []bool{false, true} {
		connection, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
		mustDo(t, err)
		defer connection.Close()
		_, err = fmt.Fprintf(connection, "POST /files/upload HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s",
			httpx.TokenHeader, testkit.Token, formKind, int64(1)<<40, formPart("metadata", `{"path":""}`)+"--B\r\n")
		mustDo(t, err)
		if endless {
			go func() { _, _ = io.Copy(connection, zeros{}) }()
		}
		mustDo(t, connection.SetReadDeadline(time.Now().Add(20*time.Second)))
		response, err := http.ReadResponse(bufio.NewReader(connection), nil)
		mustDo(t, err)
		testkit.Equal(t, 400, response.StatusCode)
		connection.Close()
	}
}

type zeros struct{}

func (zeros) Read(data []byte) (int, error) { return len(data), nil }

func TestAFailedFileLeavesNoTemporaryOne(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	mustDo(t, os.Mkdir(directory+"/x", 0o755))
	status, _ := f.uploadFile(directory+"/x", "content", "")
	testkit.Equal(t, 500, status)
	status, _ = f.uploadFile(directory+"/y", "content", `,"owner":"no-such-user"`)
	testkit.Equal(t, 500, status)
	onlyNames(t, directory, "x")
}

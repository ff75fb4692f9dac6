package files

import (
	"bytes"
	"encoding/json"
	"fmt"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/account"
	"sallyport.dev/execd/internal/environ"
)

func FuzzUpload(f *testing.F) {
	good := "--B\r\nContent-Disposition: form-data; name=\"metadata\"; filename=\"metadata\"\r\n\r\n{\"path\":\"a\",\"mode\":644}\r\n" +
		"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\ncontent\r\n--B--\r\n"
	f.Add([]byte(good), "multipart/form-data; boundary=B")
	f.Add([]byte(strings.Replace(good, `"a"`, `null`, 1)), "multipart/form-data; boundary=B")
	f.Add([]byte(good[:90]), "multipart/form-data; boundary=\"B\"")
	f.Fuzz(func(t *testing.T, body []byte, kind string) {
		request := httptest.NewRequest(http.MethodPost, "/files/upload", bytes.NewReader(body))
		request.Header.Set("Content-Type", kind)
		answer := httptest.NewRecorder()
		// Use a root that does not exist and cannot be made, so that no parsed file is written.
		files := New(environ.Fixed(nil), func() account.Accounts { return account.Accounts{} }, "/proc/nothing", 0o022)
		files.upload(confined{answer}, request)
		if answer.Code != 200 && !json.Valid(answer.Body.Bytes()) {
			t.Fatalf("%d %q", answer.Code, answer.Body)
		}
	})
}

// confined is a response writer that supports no deadlines, like the recorder.
type confined struct{ *httptest.ResponseRecorder }

func FuzzUploadMetadata(f *testing.F) {
	f.Add([]byte(`{"path":"/a","owner":null,"group":"g","mode":4755}`))
	f.Add([]byte(`{"path":"","mode":99999999999}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var form bytes.Buffer
		writer := multipart.NewWriter(&form)
		part, _ := writer.CreateFormFile("metadata", "metadata")
		_, _ = part.Write(text)
		writer.Close()
		read, err := multipart.NewReader(&form, writer.Boundary()).NextRawPart()
		if err != nil {
			t.Fatal(err) // a form that was just written must be readable
		}
		metadata, err := readMetadata(read)
		if err == nil && (metadata.Path == nil || *metadata.Path == "") {
			t.Fatal("no path was accepted")
		}
		if err == nil && metadata.Mode != nil {
			if bits, ok := permissionBits(*metadata.Mode); ok && (bits > 0o7777 || permissionNumber(bits) != *metadata.Mode) {
				t.Fatalf("mode %d became %o", *metadata.Mode, bits)
			}
		}
	})
}

func FuzzRange(f *testing.F) {
	for _, header := range []string{"bytes=0-0", "bytes=5-", "bytes=-3", "bytes=9-1", "bytes=0-1,2-3", "bytes=-0", "lines=1-2", "bytes=99999999999999999999-"} {
		f.Add(header, int64(10))
	}
	f.Fuzz(func(t *testing.T, header string, size int64) {
		if size < 0 {
			return
		}
		single, ok := firstRange(header, size)
		if !ok {
			return
		}
		var begin, end int64
		if n, err := fmt.Sscanf(single, "bytes=%d-%d", &begin, &end); n != 2 || err != nil || begin < 0 || end < begin || end >= size {
			t.Fatalf("%q of %d became %q", header, size, single)
		}
	})
}

func FuzzIdentityPaths(f *testing.F) {
	for _, path := range []string{"/0/+1/files", "/0/0/files/info", "//0/files", "/4294967295/0/x"} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		if chosen, route, ok, err := splitIdentity(path); ok && err == nil {
			if back := "/" + strconv.FormatUint(uint64(chosen.uid), 10); chosen.uid == 1<<32-1 || len(back) < 2 || route[0] != '/' {
				t.Fatalf("%q", path)
			}
		}
	})
}

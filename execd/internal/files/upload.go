package files

// POST /files/upload.
//
// Invariants
//   - The n-th metadata part belongs to the n-th file part and comes before it. Every SDK sends them so, and it is what
//     makes streaming possible.
//   - Files are written in order. If one fails, the earlier ones stay.
//   - A file that comes before its metadata is not written, and neither is any file after it. No data of these files is
//     kept. The rest of the form is still read, because the answer depends on the numbers of parts.
//   - A refused upload is read to its end, within a time limit, so that its client receives the answer.

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"sallyport.dev/execd/internal/httpx"
)

const (
	metadataLimit     = 64 << 10
	uploadPartsLimit  = 20000     // parts of one form, enough for 10,000 files
	uploadCopyBuffer  = 128 << 10 // for reading and for writing; the form's reader handles only 4 KiB at a time
	uploadPendingSpan = 1000      // metadata parts that can precede their files
)

type uploadMetadata struct {
	Path *string `json:"path"`
	ownership
}

func fileError(code, message string) *httpx.Problem {
	return httpx.NewProblem(http.StatusBadRequest, code, message)
}

func (f *Files) upload(w http.ResponseWriter, r *http.Request) {
	if err := f.receive(w, r); err != nil {
		f.readRest(w, r)
		httpx.WriteError(w, err)
		return
	}
	httpx.WriteEmpty(w)
}

// readRest reads the rest of a refused upload for a limited time. If the connection were closed while received bytes
// are unread, the kernel would reset it and the client would lose the answer.
func (f *Files) readRest(w http.ResponseWriter, r *http.Request) {
	controller, end := http.NewResponseController(w), time.Now().Add(f.limits.linger)
	buffer := make([]byte, 32<<10)
	for now := time.Now(); now.Before(end); now = time.Now() {
		idle := now.Add(f.limits.lingerIdle)
		if end.Before(idle) {
			idle = end
		}
		_ = controller.SetReadDeadline(idle)
		if _, err := r.Body.Read(buffer); err != nil {
			if errors.Is(err, io.EOF) {
				_ = controller.SetReadDeadline(time.Time{})
			}
			return
		}
	}
}

// uploadCount counts the parts that a form has had so far.
type uploadCount struct {
	parts, metadata, files int
	early                  int // number of the first file that came before its metadata; 0 if there is none
}

// err returns the error of the whole form, or nil.
func (c uploadCount) err() error {
	switch {
	case c.metadata == 0 && c.files == 0:
		return fileError(httpx.CodeInvalidFile, "multipart form is empty")
	case c.metadata == 0:
		return fileError(httpx.CodeInvalidMetadata, "metadata is missing")
	case c.files == 0:
		return fileError(httpx.CodeInvalidContent, "file is missing")
	case c.metadata != c.files:
		return fileError(httpx.CodeInvalidFile, "numbers of metadata and file parts differ")
	case c.early > 0:
		return fileError(httpx.CodeInvalidMetadata, "metadata of file "+strconv.Itoa(c.early)+" comes after it")
	}
	return nil
}

func (f *Files) receive(w http.ResponseWriter, r *http.Request) error {
	kind, parameters, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" || parameters["boundary"] == "" {
		return fileError(httpx.CodeInvalidFile, "multipart/form-data with a boundary is required")
	}
	form := multipart.NewReader(bufio.NewReaderSize(httpx.RequestBody(w, r), uploadCopyBuffer), parameters["boundary"])
	var waiting []uploadMetadata
	buffer := bufio.NewWriterSize(nil, uploadCopyBuffer)
	var count uploadCount
	for {
		part, err := form.NextRawPart()
		if errors.Is(err, io.EOF) {
			return count.err()
		}
		if err != nil {
			return formProblem(err)
		}
		if count.parts++; count.parts > uploadPartsLimit {
			return fileError(httpx.CodeInvalidFile, "too many parts in one request")
		}
		switch part.FormName() {
		case "metadata":
			count.metadata++
			if count.early > 0 {
				continue
			}
			if len(waiting) >= uploadPendingSpan {
				return fileError(httpx.CodeInvalidFile, "too many files in one request")
			}
			next, err := readMetadata(part)
			if err != nil {
				return err
			}
			waiting = append(waiting, next)
		case "file":
			count.files++
			if count.early == 0 && len(waiting) == 0 {
				count.early = count.files
			}
			if count.early > 0 {
				continue // only counted, because the numbers decide the answer
			}
			if err := f.store(part, waiting[0], buffer); err != nil {
				return err
			}
			waiting = waiting[1:]
		}
	}
}

func formProblem(err error) error {
	var malformed textproto.ProtocolError
	if errors.As(err, &malformed) {
		return fileError(httpx.CodeInvalidFile, "a part of the multipart form has a header that is none: is there a control character in the file name?")
	}
	return fileError(httpx.CodeInvalidFile, "the multipart form is broken or incomplete")
}

func readMetadata(part *multipart.Part) (uploadMetadata, error) {
	var metadata uploadMetadata
	raw, err := io.ReadAll(io.LimitReader(part, metadataLimit+1))
	if err != nil || len(raw) > metadataLimit {
		return metadata, fileError(httpx.CodeInvalidMetadata, "metadata is incomplete or too large")
	}
	if err := json.Unmarshal(raw, &metadata); err != nil {
		return metadata, fileError(httpx.CodeInvalidMetadata, "metadata: "+httpx.JSONFault(err))
	}
	if metadata.Path == nil || *metadata.Path == "" {
		return metadata, fileError(httpx.CodeInvalidMetadata, "metadata path is empty")
	}
	return metadata, nil
}

// Put writes one file that only the daemon's user can read. It makes missing directories.
func (f *Files) Put(path, content string) error {
	mode := 600 // octal digits, as in a request
	return f.store(strings.NewReader(content), uploadMetadata{&path, ownership{Mode: &mode}}, bufio.NewWriterSize(nil, uploadCopyBuffer))
}

func (f *Files) store(part io.Reader, metadata uploadMetadata, buffer *bufio.Writer) error {
	path, err := f.expand(*metadata.Path)
	if err != nil {
		return err
	}
	wanted, err := f.check(metadata.ownership)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	return f.write(path, wanted, func(file io.Writer) error {
		buffer.Reset(struct{ io.Writer }{file}) // hides the file's ReadFrom, which would bypass the buffer
		if _, err := buffer.ReadFrom(part); err != nil {
			return err
		}
		return buffer.Flush()
	})
}

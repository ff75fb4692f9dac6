package main

// POST /files/upload (contract 9.3).
//
// Invariants
//   - The n-th metadata part belongs to the n-th file part and comes before it
//     (every SDK sends it so), which is what allows streaming.
//   - Files are written in order; earlier ones stay if a later one fails.

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
)

const (
	metadataLimit     = 64 << 10
	uploadFilesLimit  = 10000
	uploadCopyBuffer  = 128 << 10 // of each side: the form's reader takes and gives 4 KiB at a time
	uploadPendingSpan = 1000      // metadata parts that may precede their files
)

type uploadMetadata struct {
	Path *string `json:"path"`
	ownership
}

func fileError(code, message string) *problem {
	return &problem{http.StatusBadRequest, code, message}
}

func (f *Files) upload(w http.ResponseWriter, r *http.Request) {
	if err := f.receive(w, r); err != nil {
		writeError(w, err)
		return
	}
	writeEmpty(w)
}

func (f *Files) receive(w http.ResponseWriter, r *http.Request) error {
	kind, parameters, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" || parameters["boundary"] == "" {
		return fileError(codeInvalidFile, "multipart/form-data with a boundary is required")
	}
	form := multipart.NewReader(bufio.NewReaderSize(requestBody(w, r), uploadCopyBuffer), parameters["boundary"])
	var waiting []uploadMetadata
	buffer := bufio.NewWriterSize(nil, uploadCopyBuffer)
	metadata, files := 0, 0
	for {
		part, err := form.NextRawPart()
		if errors.Is(err, io.EOF) {
			break
		}
		var malformed textproto.ProtocolError
		if errors.As(err, &malformed) {
			return fileError(codeInvalidFile, "a part of the multipart form has a header that is none: is there a control character in the file name?")
		}
		if err != nil {
			return fileError(codeInvalidFile, "the multipart form is broken or incomplete")
		}
		switch part.FormName() {
		case "metadata":
			metadata++
			if metadata > uploadFilesLimit || len(waiting) >= uploadPendingSpan {
				return fileError(codeInvalidFile, "too many files in one request")
			}
			next, err := readMetadata(part)
			if err != nil {
				return err
			}
			waiting = append(waiting, next)
		case "file":
			files++
			if len(waiting) == 0 {
				return fileError(codeInvalidMetadata, "metadata of file "+strconv.Itoa(files)+" is missing or comes after it")
			}
			if err := f.store(part, waiting[0], buffer); err != nil {
				return err
			}
			waiting = waiting[1:]
		}
	}
	switch {
	case metadata == 0:
		return fileError(codeInvalidFile, "multipart form is empty")
	case files == 0:
		return fileError(codeInvalidContent, "file is missing")
	case len(waiting) > 0:
		return fileError(codeInvalidFile, "numbers of metadata and file parts differ")
	}
	return nil
}

func readMetadata(part *multipart.Part) (uploadMetadata, error) {
	var metadata uploadMetadata
	raw, err := io.ReadAll(io.LimitReader(part, metadataLimit+1))
	if err != nil || len(raw) > metadataLimit {
		return metadata, fileError(codeInvalidMetadata, "metadata is incomplete or too large")
	}
	if err := json.Unmarshal(raw, &metadata); err != nil {
		return metadata, fileError(codeInvalidMetadata, "metadata: "+jsonFault(err))
	}
	if metadata.Path == nil || *metadata.Path == "" {
		return metadata, fileError(codeInvalidMetadata, "metadata path is empty")
	}
	return metadata, nil
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
		buffer.Reset(struct{ io.Writer }{file}) // a bare file would take what comes as it comes
		if _, err := buffer.ReadFrom(part); err != nil {
			return err
		}
		return buffer.Flush()
	})
}

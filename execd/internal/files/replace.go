package files

// POST /files/replace.
//
// Invariants
//   - Replacing compares bytes and is streamed. A file without a match is not changed.

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"

	"sallyport.dev/execd/internal/httpx"
)

const replaceBuffer = 128 << 10

type replacement struct {
	Old string `json:"old"`
	New string `json:"new"`
}

type replacedCount struct {
	Replaced int64 `json:"replacedCount"`
}

func (f *Files) replace(w http.ResponseWriter, r *http.Request) {
	query, err := parseQuery(r)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	counts, err := f.replaceAll(w, r)
	switch {
	case err != nil:
		httpx.WriteError(w, err)
	case query.Get("verbose") == "true":
		httpx.WriteJSON(w, http.StatusOK, counts)
	default:
		httpx.WriteEmpty(w)
	}
}

func (f *Files) replaceAll(w http.ResponseWriter, r *http.Request) (map[string]replacedCount, error) {
	var request map[string]replacement
	if err := httpx.DecodeJSON(w, r, httpx.FileBodyLimit, &request); err != nil {
		return nil, err
	}
	names := make([]string, 0, len(request))
	for name, change := range request {
		if change.Old == "" {
			return nil, httpx.BadRequest("old must not be empty")
		}
		names = append(names, name)
	}
	slices.Sort(names)
	counts := map[string]replacedCount{}
	for _, name := range names {
		path, err := f.expand(name)
		if err != nil {
			return nil, err
		}
		count, err := f.replaceIn(path, []byte(request[name].Old), []byte(request[name].New))
		if err != nil {
			return nil, err
		}
		counts[name] = replacedCount{count}
	}
	return counts, nil
}

func (f *Files) replaceIn(path string, from, to []byte) (count int64, err error) {
	file, _, err := openRegular(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	// Count first, because most files of a search-and-replace have no match.
	if count, err = substitute(io.Discard, file, from, to); err != nil || count == 0 {
		return 0, err
	}
	if _, err = file.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	err = f.write(path, checked{uid: -1, gid: -1}, func(w io.Writer) (err error) {
		out := bufio.NewWriterSize(w, replaceBuffer) // so that an occurrence does not need system calls of its own
		if count, err = substitute(out, file, from, to); err != nil {
			return err
		}
		return out.Flush()
	})
	return count, err
}

// substitute copies r to w and replaces every occurrence of from. It uses a buffer of bounded size.
func substitute(w io.Writer, r io.Reader, from, to []byte) (count int64, err error) {
	buffer := make([]byte, 0, max(256<<10, 2*len(from)))
	for {
		n, err := r.Read(buffer[len(buffer):cap(buffer)])
		buffer = buffer[:len(buffer)+n]
		if err != nil && !errors.Is(err, io.EOF) {
			return count, err
		}
		ended, rest := err != nil, buffer
		for {
			at := bytes.Index(rest, from)
			if at < 0 {
				break
			}
			if _, err := w.Write(rest[:at]); err != nil {
				return count, err
			}
			if _, err := w.Write(to); err != nil {
				return count, err
			}
			rest = rest[at+len(from):]
			count++
		}
		sure := len(rest) // bytes that cannot be the beginning of a match
		if !ended {
			sure = max(0, len(rest)-len(from)+1)
		}
		if _, err := w.Write(rest[:sure]); err != nil {
			return count, err
		}
		if ended {
			return count, nil
		}
		buffer = buffer[:copy(buffer[:cap(buffer)], rest[sure:])]
	}
}

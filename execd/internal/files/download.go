package files

// GET /files/download.
//
// Invariants
//   - Only regular files are served. Opening a file never blocks.
//   - Only the first range of a request is served. If it cannot be satisfied, the answer is 416, as JSON and with the
//     size of the file.
//   - Reading lines uses bounded memory for any length of line.

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"sallyport.dev/execd/internal/httpx"
)

func (f *Files) download(w http.ResponseWriter, r *http.Request) {
	query, err := parseQuery(r)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	path, err := f.onePath(query)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	offset, limit, lines, err := lineWindow(query)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	if lines && r.Header.Get("Range") != "" {
		httpx.WriteError(w, httpx.BadRequest("offset and limit exclude Range"))
		return
	}
	file, info, err := openRegular(path)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	defer file.Close()
	if lines {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_ = copyLines(w, file, offset, limit)
		return
	}
	header := w.Header()
	if requested := r.Header.Get("Range"); requested != "" {
		single, ok := firstRange(requested, info.Size())
		if !ok {
			header.Set("Content-Range", "bytes */"+strconv.FormatInt(info.Size(), 10))
			httpx.WriteError(w, httpx.NewProblem(http.StatusRequestedRangeNotSatisfiable, httpx.CodeUnknown, "range cannot be satisfied"))
			return
		}
		r.Header.Set("Range", single)
	}
	header.Set("Content-Type", "application/octet-stream")
	header.Set("Content-Disposition", contentDisposition(filepath.Base(path)))
	http.ServeContent(w, r, "", info.ModTime(), file)
}

// openRegular opens a regular file. It never waits for the other end of a FIFO.
func openRegular(path string) (*os.File, fs.FileInfo, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ENXIO) { // the path names a socket
		return nil, nil, httpx.BadRequest("not a regular file: " + path)
	}
	if err != nil {
		return nil, nil, fileProblem(err)
	}
	info, err := file.Stat()
	if err != nil {
		file.Close()
		return nil, nil, err
	}
	if !info.Mode().IsRegular() {
		file.Close()
		return nil, nil, httpx.BadRequest("not a regular file: " + path)
	}
	return file, info, nil
}

// lineWindow reads the parameters offset (the first line, from 1) and limit (the number of lines). If they are missing,
// it returns 1 and 0; the limit 0 means all lines.
func lineWindow(query url.Values) (offset, limit int64, present bool, err error) {
	offset = 1
	for name, into := range map[string]*int64{"offset": &offset, "limit": &limit} {
		text := query.Get(name)
		if text == "" {
			continue
		}
		present = true
		if *into, err = strconv.ParseInt(text, 10, 64); err != nil || *into < 1 {
			return 0, 0, true, httpx.BadRequest(name + " must be a number, 1 or more")
		}
	}
	return offset, limit, present, nil
}

// firstRange returns the first range of a Range header, limited to the size. It returns false if the range cannot be
// satisfied.
func firstRange(header string, size int64) (string, bool) {
	set, ok := strings.CutPrefix(header, "bytes=")
	if !ok {
		return "", false
	}
	first, _, _ := strings.Cut(set, ",")
	from, to, ok := strings.Cut(strings.TrimSpace(first), "-")
	if !ok {
		return "", false
	}
	begin, end, ok := rangeBounds(from, to, size)
	if !ok || begin >= size {
		return "", false
	}
	return "bytes=" + strconv.FormatInt(begin, 10) + "-" + strconv.FormatInt(end, 10), true
}

// rangeBounds returns the first and the last byte of a range. A range can omit one of them: "5-", "5-9", or "-9" for
// the last nine bytes. The first byte can be beyond the size.
func rangeBounds(from, to string, size int64) (begin, end int64, ok bool) {
	if from == "" {
		suffix, err := strconv.ParseUint(to, 10, 63)
		if err != nil || suffix == 0 {
			return 0, 0, false
		}
		return max(0, size-int64(suffix)), size - 1, true
	}
	first, err := strconv.ParseUint(from, 10, 63)
	if err != nil {
		return 0, 0, false
	}
	if to == "" {
		return int64(first), size - 1, true
	}
	last, err := strconv.ParseUint(to, 10, 63)
	if err != nil || last < first {
		return 0, 0, false
	}
	return int64(first), min(size-1, int64(last)), true
}

// contentDisposition returns a header value with the quoted name of a file. If the name is not plain ASCII, it adds the
// UTF-8 form.
func contentDisposition(name string) string {
	plain := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '_'
		}
		return r
	}, name)
	value := `attachment; filename="` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(plain) + `"`
	if plain != name {
		value += "; filename*=UTF-8''" + strings.ReplaceAll(url.QueryEscape(strings.ToValidUTF8(name, "_")), "+", "%20")
	}
	return value
}

// copyLines writes lines joined by \n, without their terminators and without a final \n.
func copyLines(w io.Writer, source io.Reader, offset, limit int64) error {
	reader := bufio.NewReaderSize(source, 64<<10)
	out := bufio.NewWriterSize(w, 64<<10)
	last := int64(-1)
	if limit > 0 && offset <= 1<<62-limit {
		last = offset + limit // the first line after the wanted ones
	}
	held := false // a \r at the end of a piece is held back, because \n can follow in the next piece
	for line, fresh := int64(1), true; last < 0 || line < last; {
		piece, err := reader.ReadSlice('\n')
		ended := err == nil
		if line >= offset && len(piece) > 0 {
			if fresh && line > offset {
				_ = out.WriteByte('\n')
			}
			if ended {
				piece = piece[:len(piece)-1]
			}
			if held && (len(piece) > 0 || !ended) {
				_ = out.WriteByte('\r')
			}
			held = len(piece) > 0 && piece[len(piece)-1] == '\r'
			if held {
				piece = piece[:len(piece)-1]
			}
			if _, failed := out.Write(piece); failed != nil {
				return failed
			}
		}
		fresh = ended
		switch {
		case ended:
			held = false
			line++
		case errors.Is(err, bufio.ErrBufferFull):
		default:
			if held { // a \r without \n at the end of the file is content
				_ = out.WriteByte('\r')
			}
			return out.Flush()
		}
	}
	return out.Flush()
}

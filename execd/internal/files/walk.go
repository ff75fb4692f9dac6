package files

// GET /directories/list and GET /files/search.
//
// Invariants
//   - Walks are in preorder and lexical order, and never follow a link. They skip unreadable directories. They also
//     skip the kernel's file systems /proc and /sys, unless the request's path is one of these or inside it.
//   - Memory is bounded for any size of directory (names.go).
//   - Results are streamed. A walk ends when its client disconnects. The number of concurrent walks is limited.
//   - The size of an answer is bounded. If it would be larger, the request gets an error before the first byte of the
//     answer. If the tree grows beyond the bound after that, the transfer is aborted. An answer is never truncated
//     silently.

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strconv"

	"sallyport.dev/execd/internal/httpx"
)

// walk is one listing or search.
type walk struct {
	names   nameReader
	root    string
	depth   int // levels below the root; negative: all
	entries int // largest number of entries in the answer
	want    func(name string, directory bool) bool
}

func (f *Files) newWalk(ctx context.Context, root string, depth int, want func(name string, directory bool) bool) *walk {
	return &walk{names: nameReader{ctx, f.limits.walkNames}, root: root, depth: depth, entries: f.limits.walkEntries, want: want}
}

func (k *walk) tooMany() error {
	return httpx.BadRequest(fmt.Sprintf(
		"more than %d entries below %s: ask for a smaller directory, a narrower pattern or a smaller depth", k.entries, k.root))
}

// count returns an error if the answer would exceed its bound. It holds only the names of directories in memory.
func (k *walk) count() error {
	found := 0
	hold := func(entry nameEntry, first bool) (bool, error) {
		if first && k.want(entry.name, entry.directory) {
			found++
		}
		if found > k.entries {
			return false, k.tooMany()
		}
		return entry.directory && k.depth != 1, nil
	}
	return k.below(k.root, k.depth, hold, func(string) error { return nil })
}

// each calls visit for each entry of the answer.
func (k *walk) each(visit func(path string, info fs.FileInfo) error) error {
	found := 0
	hold := func(entry nameEntry, _ bool) (bool, error) {
		return entry.directory || k.want(entry.name, false), nil
	}
	return k.below(k.root, k.depth, hold, func(path string) error {
		info, err := os.Lstat(path)
		if err != nil || !k.want(info.Name(), info.IsDir()) {
			return nil // removed or replaced since the directory was read
		}
		if found++; found > k.entries {
			return k.tooMany()
		}
		return visit(path, info)
	})
}

// below calls use for each entry that hold accepts, and enters those that are directories.
func (k *walk) below(directory string, depth int, hold holder, use func(path string) error) error {
	if depth == 0 {
		return nil
	}
	open := directory
	if directory == k.root {
		open += "/." // the root of a search can be a link
	}
	if directory == "/" {
		directory = ""
	}
	err := k.names.read(open, hold, func(entry nameEntry) error {
		path := directory + "/" + entry.name
		if err := use(path); err != nil {
			return err
		}
		if !entry.directory || path == "/proc" || path == "/sys" {
			return nil
		}
		return k.below(path, depth-1, hold, use)
	})
	var skipped unreadable
	if errors.As(err, &skipped) {
		return nil
	}
	return err
}

// enter waits for a slot for a walk, until the client disconnects.
func (f *Files) enter(ctx context.Context) error {
	select {
	case f.walks <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stream writes the entries of a walk as a JSON array. If it returns an error, the handler must abort the connection,
// so that a partial list does not look complete.
func (f *Files) stream(w http.ResponseWriter, k *walk) error {
	if err := f.enter(k.names.ctx); err != nil {
		return nil // the client has disconnected
	}
	defer func() { <-f.walks }()
	if err := k.count(); err != nil {
		httpx.WriteError(w, err)
		return nil
	}
	accounts := f.accounts()
	w.Header().Set("Content-Type", "application/json")
	out := bufio.NewWriterSize(w, 64<<10)
	separator := "["
	err := k.each(func(path string, info fs.FileInfo) error {
		item, err := json.Marshal(describe(path, info, accounts))
		if err != nil {
			return err
		}
		_, _ = out.WriteString(separator)
		separator = ","
		_, err = out.Write(item)
		return err
	})
	if err != nil {
		return err
	}
	if separator == "[" {
		_ = out.WriteByte('[')
	}
	_ = out.WriteByte(']')
	_ = out.Flush()
	return nil
}

// listable returns an error if the root cannot be read. Without this check the answer would be the same as for an empty
// directory.
func listable(root string) error {
	directory, err := os.Open(root)
	if err != nil {
		return err
	}
	return directory.Close()
}

// walking returns a handler that answers with the entries of a walk, which of makes from the request. If the list
// cannot be sent completely, the handler aborts the connection.
func (f *Files) walking(of func(r *http.Request) (*walk, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		walked, err := of(r)
		if err != nil {
			httpx.WriteError(w, err)
			return
		}
		if err := f.stream(w, walked); err != nil {
			panic(http.ErrAbortHandler)
		}
	}
}

func (f *Files) searchOf(r *http.Request) (*walk, error) {
	query, err := parseQuery(r)
	if err != nil {
		return nil, err
	}
	root, err := f.onePath(query)
	if err != nil {
		return nil, err
	}
	pattern := query.Get("pattern")
	if pattern == "" {
		pattern = "**"
	}
	glob, err := CompileGlob(pattern)
	if err != nil {
		return nil, httpx.BadRequest(err.Error())
	}
	info, err := os.Stat(root)
	if err != nil {
		return nil, fileProblem(err)
	}
	if !info.IsDir() {
		return nil, httpx.BadRequest("not a directory: " + root)
	}
	if err := listable(root); err != nil {
		return nil, err
	}
	return f.newWalk(r.Context(), root, -1, func(name string, directory bool) bool { return !directory && glob.Match(name) }), nil
}

func (f *Files) listOf(r *http.Request) (*walk, error) {
	query, err := parseQuery(r)
	if err != nil {
		return nil, err
	}
	root, err := f.onePath(query)
	if err != nil {
		return nil, err
	}
	depth := 1
	if text := query.Get("depth"); text != "" {
		if depth, err = strconv.Atoi(text); err != nil || depth < 0 {
			return nil, httpx.BadRequest("depth must be a number, 0 or more")
		}
	}
	info, err := os.Lstat(root)
	switch {
	case err != nil:
		return nil, fileProblem(err)
	case info.Mode()&fs.ModeSymlink != 0:
		return nil, httpx.BadRequest("a link cannot be listed: " + root)
	case !info.IsDir():
		return nil, httpx.BadRequest("not a directory: " + root)
	}
	if err := listable(root); err != nil {
		return nil, err
	}
	return f.newWalk(r.Context(), root, depth, func(string, bool) bool { return true }), nil
}

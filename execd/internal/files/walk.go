package files

// GET /directories/list and GET /files/search.
//
// Invariants
//   - Walks are preorder and lexical, never follow a link, skip what cannot be
//     read and the kernel's own trees (/proc, /sys) unless asked for directly.
//   - Memory is bounded for any size of directory (names.go).
//   - Results are streamed; a walk ends when its client leaves; few run at a time.
//   - An answer is bounded. A larger one gets an error before the first byte of the answer. If the
//     tree grows beyond the bound meanwhile, the transfer is aborted. It is never truncated silently.

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
	depth   int // levels below the root, < 0: all
	entries int // in the answer, at most
	want    func(name string, directory bool) bool
}

func (f *Files) newWalk(ctx context.Context, root string, depth int, want func(name string, directory bool) bool) *walk {
	return &walk{names: nameReader{ctx, f.limits.walkNames}, root: root, depth: depth, entries: f.limits.walkEntries, want: want}
}

func (k *walk) tooMany() error {
	return httpx.BadRequest(fmt.Sprintf(
		"more than %d entries below %s: ask for a smaller directory, a narrower pattern or a smaller depth", k.entries, k.root))
}

// count fails if the answer would exceed its bound. It holds the names of directories alone.
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

// each visits what the answer holds.
func (k *walk) each(visit func(path string, info fs.FileInfo) error) error {
	found := 0
	hold := func(entry nameEntry, _ bool) (bool, error) {
		return entry.directory || k.want(entry.name, false), nil
	}
	return k.below(k.root, k.depth, hold, func(path string) error {
		info, err := os.Lstat(path)
		if err != nil || !k.want(info.Name(), info.IsDir()) {
			return nil // vanished, or exchanged since it was read
		}
		if found++; found > k.entries {
			return k.tooMany()
		}
		return visit(path, info)
	})
}

// below uses the entries that hold accepts, and enters the directories among them.
func (k *walk) below(directory string, depth int, hold holder, use func(path string) error) error {
	if depth == 0 {
		return nil
	}
	open := directory
	if directory == k.root {
		open += "/." // the root of a search may be a link
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

// enter takes a slot for a walk or gives up with the client.
func (f *Files) enter(ctx context.Context) error {
	select {
	case f.walks <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stream writes what a walk finds as a JSON array. After an error the handler must abort
// the connection: a partial list must not end well.
func (f *Files) stream(w http.ResponseWriter, k *walk) error {
	if err := f.enter(k.names.ctx); err != nil {
		return nil // the client has left
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

// listable refuses a root that cannot be read: no entries would look like an empty directory.
func listable(root string) error {
	directory, err := os.Open(root)
	if err != nil {
		return err
	}
	return directory.Close()
}

// walking answers with the entries of a walk that a request describes. A list that cannot be
// sent whole aborts the connection.
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

package main

// GET /directories/list and GET /files/search (contract 9.2).
//
// Invariants
//   - Walks are preorder and lexical, never follow a link, skip what cannot be
//     read and the kernel's own trees (/proc, /sys) unless asked for directly.
//   - Results are streamed; a walk ends when its client leaves; few run at a time.

import (
	"bufio"
	"context"
	"encoding/json"
	"io/fs"
	"net/http"
	"os"
	"strconv"
)

// walker visits a tree; visit is called for every entry below the root.
type walker struct {
	ctx   context.Context
	root  string
	visit func(path string, info fs.FileInfo) error
}

func (k *walker) walk(directory string, depth int) error {
	if depth == 0 {
		return nil
	}
	entries, err := os.ReadDir(directory) // sorted by name
	if err != nil && len(entries) == 0 {
		return nil
	}
	if directory == "/" {
		directory = ""
	}
	for _, entry := range entries {
		if err := k.ctx.Err(); err != nil {
			return err
		}
		path := directory + "/" + entry.Name()
		info, err := entry.Info()
		if err != nil {
			continue
		}
		if err := k.visit(path, info); err != nil {
			return err
		}
		if info.IsDir() && path != "/proc" && path != "/sys" {
			if err := k.walk(path, depth-1); err != nil {
				return err
			}
		}
	}
	return nil
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

// stream writes the entries that want accepts as a JSON array.
func (f *Files) stream(w http.ResponseWriter, r *http.Request, root string, depth int, want func(fs.FileInfo) bool) {
	if err := f.enter(r.Context()); err != nil {
		return
	}
	defer func() { <-f.walks }()
	accounts := f.accounts()
	w.Header().Set("Content-Type", "application/json")
	out := bufio.NewWriterSize(w, 64<<10)
	_ = out.WriteByte('[')
	first := true
	walk := walker{ctx: r.Context(), root: root, visit: func(path string, info fs.FileInfo) error {
		if !want(info) {
			return nil
		}
		if !first {
			_ = out.WriteByte(',')
		}
		first = false
		item, err := json.Marshal(describe(path, info, accounts))
		if err != nil {
			return nil // a name JSON cannot hold does not exist: Marshal replaces it
		}
		_, err = out.Write(item)
		return err
	}}
	if err := walk.walk(root, depth); err != nil {
		panic(http.ErrAbortHandler) // the client is gone; never end a partial list well
	}
	_ = out.WriteByte(']')
	_ = out.Flush()
}

// rootOf checks that a walk can begin.
func (f *Files) rootOf(r *http.Request) (string, error) {
	query, err := parseQuery(r)
	if err != nil {
		return "", err
	}
	return f.onePath(query)
}

// listable refuses a root that cannot be read: no entries would look like an empty directory.
func listable(root string) error {
	directory, err := os.Open(root)
	if err != nil {
		return err
	}
	return directory.Close()
}

func (f *Files) search(w http.ResponseWriter, r *http.Request) {
	root, err := f.rootOf(r)
	if err != nil {
		writeError(w, err)
		return
	}
	pattern := r.URL.Query().Get("pattern")
	if pattern == "" {
		pattern = "**"
	}
	glob, err := CompileGlob(pattern)
	if err != nil {
		writeError(w, badRequest(err.Error()))
		return
	}
	info, err := os.Stat(root)
	if err != nil {
		writeError(w, fileProblem(err))
		return
	}
	if !info.IsDir() {
		writeError(w, badRequest("not a directory: "+root))
		return
	}
	if err := listable(root); err != nil {
		writeError(w, err)
		return
	}
	f.stream(w, r, root, -1, func(info fs.FileInfo) bool { return !info.IsDir() && glob.Match(info.Name()) })
}

func (f *Files) list(w http.ResponseWriter, r *http.Request) {
	root, err := f.rootOf(r)
	if err != nil {
		writeError(w, err)
		return
	}
	depth := 1
	if text := r.URL.Query().Get("depth"); text != "" {
		if depth, err = strconv.Atoi(text); err != nil || depth < 0 {
			writeError(w, badRequest("depth must be a number, 0 or more"))
			return
		}
	}
	info, err := os.Lstat(root)
	switch {
	case err != nil:
		writeError(w, fileProblem(err))
	case info.Mode()&fs.ModeSymlink != 0:
		writeError(w, badRequest("a link cannot be listed: "+root))
	case !info.IsDir():
		writeError(w, badRequest("not a directory: "+root))
	default:
		if err := listable(root); err != nil {
			writeError(w, err)
			return
		}
		f.stream(w, r, root, depth, func(fs.FileInfo) bool { return true })
	}
}

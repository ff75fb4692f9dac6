// Package files serves files and directories: paths, metadata and ownership, also as a chosen identity.
//
// Invariants
//   - Paths are not confined: the kernel and the permissions of the daemon's user decide. An existing link is followed
//     only where the contract says so, and never by a recursive walk.
//   - A variable in a path is replaced only if it is defined. "$5" is a literal name.
//   - The content of a FIFO or device is never transferred, and neither of them blocks a request.
package files

import (
	"errors"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/account"
	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/sys"
)

// concurrentWalks is the number of recursive walks that can run at the same time.
const concurrentWalks = 8

// Files serves the file and directory routes.
type Files struct {
	env       *environ.Environment
	accounts  func() account.Accounts
	directory string
	umask     os.FileMode
	walks     chan struct{} // slots for recursive walks
	limits    fileLimits
}

// fileLimits are the bounds of the file routes.
type fileLimits struct {
	spoolMemory int           // bytes of content in memory before a file is written in place
	spoolPlaces []string      // directories for a file with content beyond that limit, in order of preference
	walkNames   int           // bytes of names that a walk holds, on all levels together
	walkEntries int           // entries of one answer
	linger      time.Duration // time limit for reading the rest of a refused upload
	lingerIdle  time.Duration // time limit without a byte during linger
}

// New returns a Files that serves with the identity of this process.
func New(env *environ.Environment, accounts func() account.Accounts, directory string, umask os.FileMode) *Files {
	return &Files{
		env: env, accounts: accounts, directory: directory, umask: umask,
		walks: make(chan struct{}, concurrentWalks),
		limits: fileLimits{
			spoolMemory: 256 << 10,
			spoolPlaces: []string{"/tmp", "/var/tmp", "/dev/shm", "/"},
			walkNames:   32 << 20,
			walkEntries: 1_000_000,
			linger:      30 * time.Second,
			lingerIdle:  5 * time.Second,
		},
	}
}

// Route returns the handler of a file or directory route, or nil if there is none.
func (f *Files) Route(method, path string) http.HandlerFunc {
	switch method + " " + path {
	case "GET /files/info":
		return f.info
	case "GET /files/search":
		return f.walking(f.searchOf)
	case "GET /files/download":
		return f.download
	case "POST /files/upload":
		return f.upload
	case "POST /files/mv":
		return f.move
	case "POST /files/permissions":
		return f.permissions
	case "POST /files/replace":
		return f.replace
	case "DELETE /files":
		return f.remove
	case "GET /directories/list":
		return f.walking(f.listOf)
	case "POST /directories":
		return f.makeDirectories
	case "DELETE /directories":
		return f.removeDirectories
	}
	return nil
}

// IsFileRoute reports whether a route is a file or directory route.
func IsFileRoute(method, path string) bool { return (&Files{}).Route(method, path) != nil }

// fileInfo is FileInfo of the contract. Every key is always present.
type fileInfo struct {
	Path       string    `json:"path"`
	Type       string    `json:"type"`
	Size       int64     `json:"size"`
	ModifiedAt time.Time `json:"modified_at"`
	CreatedAt  time.Time `json:"created_at"`
	Owner      string    `json:"owner"`
	Group      string    `json:"group"`
	Mode       int       `json:"mode"`
}

// ownership is the mode, owner and group that a request can set.
type ownership struct {
	Mode  *int    `json:"mode"`
	Owner *string `json:"owner"`
	Group *string `json:"group"`
}

// expand converts a request's path to a clean absolute path.
func (f *Files) expand(path string) (string, error) {
	if path == "" || strings.IndexByte(path, 0) >= 0 {
		return "", httpx.BadRequest("path must not be empty or contain NUL")
	}
	prefix := ""
	if rest, ok := strings.CutPrefix(path, "~"); ok && (rest == "" || rest[0] == '/') {
		prefix, path = f.env.Home(f.accounts)+"/", rest
	}
	path = prefix + environ.Expand(path, f.env.Lookup, environ.KeepUndefined)
	if !filepath.IsAbs(path) {
		path = f.directory + "/" + path
	}
	return filepath.Clean(path), nil
}

// parseQuery returns an error for a malformed query. Query() would silently drop its malformed parts.
func parseQuery(r *http.Request) (url.Values, error) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, httpx.BadRequest("invalid query")
	}
	return values, nil
}

// onePath returns the single path parameter of a request, expanded.
func (f *Files) onePath(query url.Values) (string, error) {
	if query.Get("path") == "" {
		return "", httpx.MissingQuery("path")
	}
	return f.expand(query.Get("path"))
}

// permissionNumber returns mode bits as a decimal number with the octal digits: 0644 becomes 644.
func permissionNumber(mode uint32) int {
	number, _ := strconv.Atoi(strconv.FormatUint(uint64(mode&0o7777), 8))
	return number
}

// permissionBits is the inverse of permissionNumber. ok is false for the digits 8 and 9 and for too large numbers.
func permissionBits(number int) (bits uint32, ok bool) {
	value, err := strconv.ParseUint(strconv.Itoa(number), 8, 32)
	if err != nil || value > 0o7777 {
		return 0, false
	}
	return uint32(value), true
}

// checked is an ownership with resolved names. An id of -1 leaves the owner or group unchanged.
type checked struct {
	mode     uint32
	setMode  bool
	uid, gid int
}

func (f *Files) check(o ownership) (checked, error) {
	result := checked{uid: -1, gid: -1}
	if o.Mode != nil && *o.Mode != 0 {
		bits, ok := permissionBits(*o.Mode)
		if !ok {
			return result, httpx.BadRequest("mode must be octal digits, at most 7777")
		}
		result.mode, result.setMode = bits, true
	}
	owner, group := o.Owner != nil && *o.Owner != "", o.Group != nil && *o.Group != ""
	if !owner && !group {
		return result, nil
	}
	accounts := f.accounts()
	if owner {
		uid, err := accounts.UserID(*o.Owner)
		if err != nil {
			return result, err
		}
		result.uid = int(uid)
	}
	if group {
		gid, err := accounts.GroupID(*o.Group)
		if err != nil {
			return result, err
		}
		result.gid = int(gid)
	}
	return result, nil
}

// apply changes the owner and then the mode, because chown clears the set-id bits.
func (c checked) apply(path string) error {
	if c.uid >= 0 || c.gid >= 0 {
		if err := os.Chown(path, c.uid, c.gid); err != nil {
			return err
		}
	}
	if c.setMode {
		return sys.PathError("chmod", path, syscall.Chmod(path, c.mode))
	}
	return nil
}

// describe builds a FileInfo from the result of lstat.
func describe(path string, info fs.FileInfo, accounts account.Accounts) fileInfo {
	result := fileInfo{Path: path, Type: "other", Size: info.Size(), ModifiedAt: info.ModTime().UTC(), CreatedAt: info.ModTime().UTC()}
	switch {
	case info.Mode().IsRegular():
		result.Type = "file"
	case info.IsDir():
		result.Type = "directory"
	case info.Mode()&fs.ModeSymlink != 0:
		result.Type = "symlink"
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		result.CreatedAt = time.Unix(stat.Ctim.Unix()).UTC()
		result.Owner = accounts.UserName(stat.Uid)
		result.Group = accounts.GroupName(stat.Gid)
		result.Mode = permissionNumber(stat.Mode)
	}
	return result
}

// missing reports whether an error means that no file is at a path, also because the path leads through a file that is
// not a directory.
func missing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// fileProblem converts the error for a missing file to its own status and code.
func fileProblem(err error) error {
	if missing(err) {
		return httpx.NewProblem(http.StatusNotFound, httpx.CodeFileNotFound, sys.Explain(err))
	}
	return err
}

func (f *Files) info(w http.ResponseWriter, r *http.Request) {
	query, err := parseQuery(r)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	accounts, result := f.accounts(), map[string]fileInfo{}
	for _, requested := range query["path"] {
		path, err := f.expand(requested)
		if err != nil {
			httpx.WriteError(w, err)
			return
		}
		info, err := os.Lstat(path)
		if err != nil {
			httpx.WriteError(w, fileProblem(err))
			return
		}
		result[requested] = describe(path, info, accounts)
	}
	httpx.WriteJSON(w, http.StatusOK, result)
}

// remove deletes files and links. A missing one counts as deleted.
func (f *Files) remove(w http.ResponseWriter, r *http.Request) {
	f.eachPath(w, r, func(path string) error {
		info, err := os.Lstat(path)
		if missing(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if info.IsDir() {
			return errors.New("is a directory: " + path)
		}
		if err := os.Remove(path); !missing(err) {
			return err
		}
		return nil
	})
}

// removeDirectories deletes directories recursively. It refuses the root directory.
func (f *Files) removeDirectories(w http.ResponseWriter, r *http.Request) {
	f.eachPath(w, r, func(path string) error {
		info, err := os.Lstat(path)
		if missing(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if path == "/" {
			return httpx.BadRequest("the root directory cannot be deleted")
		}
		if !info.IsDir() {
			return errors.New("not a directory: " + path)
		}
		return os.RemoveAll(path)
	})
}

// eachPath calls act for each path of a request. It expands all paths before the first call.
func (f *Files) eachPath(w http.ResponseWriter, r *http.Request, act func(path string) error) {
	if err := f.actOnPaths(r, act); err != nil {
		httpx.WriteError(w, err)
		return
	}
	httpx.WriteEmpty(w)
}

func (f *Files) actOnPaths(r *http.Request, act func(path string) error) error {
	query, err := parseQuery(r)
	if err != nil {
		return err
	}
	paths := make([]string, len(query["path"]))
	for i, requested := range query["path"] {
		if paths[i], err = f.expand(requested); err != nil {
			return err
		}
	}
	for _, path := range paths {
		if err := act(path); err != nil {
			return err
		}
	}
	return nil
}

// ownershipRequest decodes a map from path to ownership and calls act for each entry. It checks all entries before the
// first call.
func (f *Files) ownershipRequest(w http.ResponseWriter, r *http.Request, act func(path string, c checked) error) {
	if err := f.actOnOwnership(w, r, act); err != nil {
		httpx.WriteError(w, err)
		return
	}
	httpx.WriteEmpty(w)
}

func (f *Files) actOnOwnership(w http.ResponseWriter, r *http.Request, act func(path string, c checked) error) error {
	var request map[string]ownership
	if err := httpx.DecodeJSON(w, r, httpx.FileBodyLimit, &request); err != nil {
		return err
	}
	type job struct {
		path  string
		apply checked
	}
	jobs := make([]job, 0, len(request))
	for requested, wanted := range request {
		path, err := f.expand(requested)
		if err != nil {
			return err
		}
		apply, err := f.check(wanted)
		if err != nil {
			return err
		}
		jobs = append(jobs, job{path, apply})
	}
	slices.SortFunc(jobs, func(a, b job) int { return strings.Compare(a.path, b.path) })
	for _, next := range jobs {
		if err := act(next.path, next.apply); err != nil {
			return err
		}
	}
	return nil
}

func (f *Files) permissions(w http.ResponseWriter, r *http.Request) {
	f.ownershipRequest(w, r, func(path string, c checked) error {
		if _, err := os.Stat(path); err != nil {
			return err
		}
		return c.apply(path)
	})
}

// makeDirectories makes directories, as mkdir -p does. It leaves an existing directory unchanged.
func (f *Files) makeDirectories(w http.ResponseWriter, r *http.Request) {
	f.ownershipRequest(w, r, func(path string, c checked) error {
		info, err := os.Stat(path)
		switch {
		case err == nil && info.IsDir():
			return nil
		case err == nil:
			return errors.New("not a directory: " + path)
		}
		if err := os.MkdirAll(path, 0o777); err != nil {
			return err
		}
		return c.apply(path)
	})
}

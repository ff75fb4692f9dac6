package files

// POST /files/mv.
//
// Invariants
//   - Moving never overwrites. A destination that appears meanwhile is neither replaced nor removed.
//   - A move between file systems makes the copy beside the destination, under a name that no other file has. The copy
//     gets the destination's name when it is complete. Only then is the source removed.
//   - If a move fails or its client disconnects before that, the copy is removed and the source remains.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/sys"
)

type moveRequest struct {
	Source      string `json:"src"`
	Destination string `json:"dest"`
}

func (f *Files) move(w http.ResponseWriter, r *http.Request) {
	if err := f.moveAll(w, r); err != nil {
		httpx.WriteError(w, err)
		return
	}
	httpx.WriteEmpty(w)
}

func (f *Files) moveAll(w http.ResponseWriter, r *http.Request) error {
	var request []moveRequest
	if err := httpx.DecodeJSON(w, r, httpx.FileBodyLimit, &request); err != nil {
		return err
	}
	for _, item := range request {
		from, err := f.expand(item.Source)
		if err != nil {
			return err
		}
		to, err := f.expand(item.Destination)
		if err != nil {
			return err
		}
		if err := f.moveOne(r.Context(), from, to); err != nil {
			return err
		}
	}
	return nil
}

func destinationExists(to string) error { return errors.New("destination exists: " + to) }

func intoItself(from string) error {
	return errors.New("cannot move a directory into itself: " + from)
}

func (f *Files) moveOne(ctx context.Context, from, to string) error {
	if _, err := os.Lstat(from); err != nil {
		return fileProblem(err)
	}
	if _, err := os.Lstat(to); err == nil {
		return destinationExists(to)
	}
	if from == "/" || strings.HasPrefix(to+"/", from+"/") {
		return intoItself(from)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o777); err != nil {
		return err
	}
	err := renameNew(from, to)
	switch {
	case errors.Is(err, syscall.EEXIST):
		return destinationExists(to)
	case errors.Is(err, syscall.EXDEV):
		return f.moveAcross(ctx, from, to)
	}
	return sys.PathError("rename", from, err)
}

// moveAcross moves a path to another file system.
func (f *Files) moveAcross(ctx context.Context, from, to string) error {
	// Do not copy a source that cannot be removed afterwards.
	if err := syscall.Access(filepath.Dir(from), accessWrite|accessSearch); err != nil {
		return sys.PathError("access", from, err)
	}
	made := nameBeside(to)
	if err := f.copyTree(ctx, from, made); err != nil {
		return f.withoutCopy(made, insteadOf(made, to, err))
	}
	err := renameNew(made, to)
	if errors.Is(err, syscall.EEXIST) {
		return f.withoutCopy(made, destinationExists(to))
	}
	if err != nil {
		return f.withoutCopy(made, sys.PathError("rename", to, err))
	}
	if err := f.removeTree(from); err != nil {
		return fmt.Errorf("%s is complete, but the source could not be removed entirely: %s", to, sys.Explain(err))
	}
	return nil
}

// insteadOf replaces the temporary name of the copy in an error with the name of the destination.
func insteadOf(made, to string, err error) error {
	var on *fs.PathError
	if !errors.As(err, &on) {
		return err
	}
	if rest, ok := strings.CutPrefix(on.Path, made); ok {
		return &fs.PathError{Op: on.Op, Path: to + rest, Err: on.Err}
	}
	return err
}

// withoutCopy removes a copy that does not become the destination, and returns the cause.
func (f *Files) withoutCopy(made string, cause error) error {
	if err := f.removeTree(made); err != nil {
		return fmt.Errorf("%s; an incomplete copy could not be removed: %s", sys.Explain(cause), sys.Explain(err))
	}
	return cause
}

// renameNew renames a path. It returns EEXIST if the destination exists.
func renameNew(from, to string) error {
	err := sys.RenameExclusive(from, to)
	if !errors.Is(err, syscall.ENOSYS) && !errors.Is(err, syscall.EINVAL) {
		return err
	}
	return renameOverOwn(from, to)
}

// renameOverOwn is renameNew for file systems without exclusive renaming. It first creates the destination exclusively:
// as a hard link to the source, or as an empty file or directory that the rename then replaces.
func renameOverOwn(from, to string) error {
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	if info.IsDir() {
		if err := syscall.Mkdir(to, 0o700); err != nil {
			return err
		}
		if err := syscall.Rename(from, to); err != nil { // replaces an empty directory only
			_ = syscall.Rmdir(to)
			return err
		}
		return nil
	}
	// A hard link never replaces an existing file. Not every file system supports hard links.
	err = syscall.Link(from, to)
	if err == nil {
		return removedAfter(syscall.Unlink(from), to, info)
	}
	if !errors.Is(err, syscall.EPERM) && !errors.Is(err, errors.ErrUnsupported) && !errors.Is(err, syscall.EMLINK) {
		return err
	}
	file, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	info, err = file.Stat()
	file.Close()
	if err != nil {
		return err
	}
	return removedAfter(syscall.Rename(from, to), to, info)
}

// removedAfter returns failure. If that is an error, it first removes the path, but only if the path still names the
// file own.
func removedAfter(failure error, path string, own os.FileInfo) error {
	if failure == nil {
		return nil
	}
	if now, err := os.Lstat(path); err == nil && os.SameFile(own, now) {
		_ = syscall.Unlink(path)
	}
	return failure
}

// removeTree removes a tree, including the content of directories in which the owner has no permission to write.
func (f *Files) removeTree(path string) error {
	err := os.RemoveAll(path)
	if !errors.Is(err, os.ErrPermission) {
		return err
	}
	// The client cannot cancel this, because a removal that has begun must be completed.
	if err := openTree(&nameReader{context.Background(), f.limits.walkNames}, path); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

// openTree gives the owner full permissions for all directories of a tree.
func openTree(names *nameReader, path string) error {
	info, err := os.Lstat(path)
	if err != nil || !info.IsDir() {
		return err
	}
	if mode := uint32(info.Mode().Perm()); mode&0o700 != 0o700 {
		if err := syscall.Chmod(path, mode|0o700); err != nil {
			return sys.PathError("chmod", path, err)
		}
	}
	directories := func(entry nameEntry, _ bool) (bool, error) { return entry.directory, nil }
	return names.read(path, directories, func(entry nameEntry) error { return openTree(names, path+"/"+entry.name) })
}

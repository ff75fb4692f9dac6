package files

// Replacing the content of a file.
//
// Invariants
//   - A reader sees either the old content or the new content, never a part, because the new content is written to
//     another file, which is then renamed.
//   - If the directory or a mount forbids that, an existing file is written in place (overwrite.go). In both cases the
//     new content is complete before the old content is changed.
//   - An existing file keeps owner, mode, ACL and the user's attributes unless the request names others. A link is
//     followed to its target if the kernel follows it. Only regular files are replaced.
//   - Other names of the same file (hard links) keep the old content, unless it is written in place.
//   - Content is streamed to the target's own directory. Only content for a write in place is first kept elsewhere
//     (spool.go).

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"sallyport.dev/execd/internal/sys"
)

const linkLimit = 40

// targetOf follows a link at the end of a path. The target does not need to exist.
func targetOf(path string) (string, fs.FileInfo, error) {
	for range linkLimit {
		info, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return path, nil, nil
		}
		if err != nil {
			return "", nil, err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			return path, info, nil
		}
		// The kernel decides whether the link may be followed (fs.protected_symlinks).
		if _, err := os.Stat(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", nil, err
		}
		link, err := os.Readlink(path)
		if err != nil {
			return "", nil, err
		}
		if !filepath.IsAbs(link) {
			// Do not clean the path: the kernel must resolve ".." after a linked directory.
			link = filepath.Dir(path) + "/" + link
		}
		path = link
	}
	return "", nil, sys.PathError("open", path, syscall.ELOOP)
}

// write replaces the content of path with the output of produce. If produce fails, the file stays unchanged.
func (f *Files) write(path string, wanted checked, produce func(io.Writer) error) error {
	target, existing, err := targetOf(path)
	if err != nil {
		return err
	}
	if existing != nil && !existing.Mode().IsRegular() {
		return errors.New("not a regular file: " + path)
	}
	temporary, err := createBeside(target)
	if err != nil && existing != nil && forbidden(err) {
		return f.writeInPlace(target, wanted, produce)
	}
	if err != nil {
		return named(target, err)
	}
	defer os.Remove(temporary.Name()) // does nothing after the rename
	defer temporary.Close()
	if err := produce(temporary); err != nil {
		return named(target, err)
	}
	if err := f.settle(temporary, target, existing, wanted); err != nil {
		return named(target, err)
	}
	err = os.Rename(temporary.Name(), target)
	if err == nil || existing == nil || !forbidden(err) {
		return named(target, err)
	}
	info, err := temporary.Stat()
	if err != nil {
		return named(target, err)
	}
	return f.overwrite(target, wanted, fileContent{temporary, info.Size()})
}

// writeInPlace is write for a target in whose directory no file can be created.
func (f *Files) writeInPlace(target string, wanted checked, produce func(io.Writer) error) error {
	next := f.newSpool()
	defer next.Close()
	if err := produce(next); err != nil {
		return err
	}
	return f.overwrite(target, wanted, next)
}

// forbidden reports whether an error means that a name cannot be created or replaced, although its file can possibly be
// written. Causes are the permissions of the directory, its sticky or immutable bit, or a mount point.
func forbidden(err error) bool {
	for _, cause := range []error{fs.ErrPermission, syscall.EROFS, syscall.EBUSY, syscall.EXDEV} {
		if errors.Is(err, cause) {
			return true
		}
	}
	return false
}

// createBeside makes a file in the target's directory. Only its owner can access it.
func createBeside(target string) (*os.File, error) {
	return os.OpenFile(nameBeside(target), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
}

// nameBeside returns a random, unused name in the target's directory.
func nameBeside(target string) string {
	var random [12]byte
	rand.Read(random[:])
	return filepath.Dir(target) + "/.execd-" + hex.EncodeToString(random[:])
}

// named replaces a temporary name in an error with the name of the file for which it was made.
func named(path string, err error) error {
	var on *fs.PathError
	var renaming *os.LinkError
	switch {
	case errors.As(err, &on):
		return &fs.PathError{Op: on.Op, Path: path, Err: on.Err}
	case errors.As(err, &renaming):
		return &fs.PathError{Op: renaming.Op, Path: path, Err: renaming.Err}
	}
	return err
}

// settle gives a new file its owner, attributes and mode before the file gets its final name.
func (f *Files) settle(file *os.File, target string, existing fs.FileInfo, wanted checked) error {
	mode := uint32(0o777 &^ f.umask)
	if existing != nil {
		if stat, ok := existing.Sys().(*syscall.Stat_t); ok {
			mode = keepOwner(file, stat)
		}
		attributes := slices.DeleteFunc(attributesOf(target), func(a attribute) bool {
			return a.name == attributeCapability // was set for the old content
		})
		mode = keepAttributes(file, attributes, mode)
	}
	if wanted.uid >= 0 || wanted.gid >= 0 {
		if err := file.Chown(wanted.uid, wanted.gid); err != nil {
			return err
		}
	}
	if wanted.setMode {
		mode = wanted.mode
	}
	return sys.PathError("chmod", file.Name(), syscall.Fchmod(int(file.Fd()), mode))
}

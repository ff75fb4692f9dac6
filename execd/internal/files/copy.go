package files

// Copying a tree for a move between file systems.
//
// Invariants
//   - Files, directories and links keep owner, mode and the times of change and access, to the nanosecond. Files and
//     directories also keep the extended attributes that the destination supports.
//   - A directory gets its metadata after its children are copied, because it can be read-only.
//   - Without the privilege to change the owner, the copy belongs to the daemon's user and has no set-id bits, as with
//     mv.
//   - Another mount below the source, a special file, and a destination inside the source are errors.
//   - Memory is bounded for any size of directory. Copying stops when its context is done.

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"

	"sallyport.dev/execd/internal/sys"
)

const copyPiece = 8 << 20 // bytes that are copied between two checks of the context

// treeCopy is the state of one copy.
type treeCopy struct {
	names  nameReader
	device uint64      // device of the source; a directory on another device is a mount
	top    fs.FileInfo // root of the copy; it is an error if the walk finds it in the source
}

// copyTree copies a file, link or directory to a path that does not exist.
func (f *Files) copyTree(ctx context.Context, from, to string) error {
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("no status of " + from)
	}
	c := &treeCopy{names: nameReader{ctx, f.limits.walkNames}, device: stat.Dev}
	return c.entry(from, to, info)
}

func (c *treeCopy) entry(from, to string, info fs.FileInfo) error {
	if err := c.names.ctx.Err(); err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("no status of " + from)
	}
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return copyLink(from, to, stat)
	case info.IsDir():
		return c.directory(from, to, info, stat)
	case info.Mode().IsRegular():
		return c.file(from, to, stat)
	}
	return errors.New("cannot move a special file across devices: " + from)
}

func (c *treeCopy) directory(from, to string, info fs.FileInfo, stat *syscall.Stat_t) error {
	if stat.Dev != c.device {
		return errors.New("cannot move a mount across devices: " + from)
	}
	if c.top != nil && os.SameFile(c.top, info) {
		return intoItself(from)
	}
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	made, err := openDirectory(to)
	if err != nil {
		return err
	}
	if c.top == nil {
		if c.top, err = made.Stat(); err != nil {
			made.Close()
			return err
		}
	}
	made.Close() // a tree can be deeper than the limit of descriptors
	everything := func(nameEntry, bool) (bool, error) { return true, nil }
	err = c.names.read(from, everything, func(entry nameEntry) error {
		child, err := os.Lstat(from + "/" + entry.name)
		if err != nil {
			return err
		}
		return c.entry(from+"/"+entry.name, to+"/"+entry.name, child)
	})
	if err != nil {
		return err
	}
	made, err = openDirectory(to)
	if err != nil {
		return err
	}
	defer made.Close()
	return finish(made, from, stat)
}

func (c *treeCopy) file(from, to string, stat *syscall.Stat_t) error {
	source, _, err := openRegular(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer target.Close()
	for {
		if err := c.names.ctx.Err(); err != nil {
			return err
		}
		_, err := io.CopyN(target, source, copyPiece)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if err := finish(target, from, stat); err != nil {
		return err
	}
	return target.Close()
}

func copyLink(from, to string, stat *syscall.Stat_t) error {
	link, err := os.Readlink(from)
	if err != nil {
		return err
	}
	if err := os.Symlink(link, to); err != nil {
		return err
	}
	_ = os.Lchown(to, int(stat.Uid), int(stat.Gid)) // can fail without privilege; mv ignores that too
	return sys.PathError("utimensat", to, setLinkTimes(to, stat.Atim, stat.Mtim))
}

// finish gives a copy the metadata of its original.
func finish(file *os.File, from string, stat *syscall.Stat_t) error {
	mode := keepOwner(file, stat)
	mode = keepAttributes(file, attributesOf(from), mode)
	if err := syscall.Fchmod(int(file.Fd()), mode); err != nil {
		return sys.PathError("chmod", file.Name(), err)
	}
	return sys.PathError("utimensat", file.Name(), setTimes(file, stat.Atim, stat.Mtim))
}

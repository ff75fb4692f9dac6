package files

// Writing a file in place, for a file that no other file can replace: its directory refuses new files or the rename, or
// the file is a mount point.
//
// Invariants
//   - The new content is complete before the file is opened.
//   - The order of writing is: first the part beyond the old end, then the part that overlaps the old content, then the
//     new end of the file. On common file systems only the first step needs space, and a truncation undoes it.
//   - The old content is saved before it is overwritten. If a write fails, the old content is restored. If that also
//     fails, the error says so.
//
// Writing in place is not atomic. A concurrent reader can read a mixture of both contents. After an abnormal end of the
// process or the machine the file can contain such a mixture.

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"sallyport.dev/execd/internal/sys"
)

// content is the new content of a file.
type content interface {
	io.ReaderAt
	length() int64
}

// fileContent is content in a file.
type fileContent struct {
	*os.File
	size int64
}

func (c fileContent) length() int64 { return c.size }

// overwrite gives an existing file new content and, if wanted, another owner and mode.
func (f *Files) overwrite(path string, wanted checked, next content) error {
	file, readable, err := openExisting(path)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errors.New("not a regular file: " + path)
	}
	// Change the metadata first: a refused chown or chmod must not leave new content in the file, and content for fewer
	// readers must not be visible to more.
	if err := wanted.applyTo(file); err != nil {
		return wanted.reverted(file, info, err)
	}
	change := overwriting{file: file, former: info.Size(), next: next, kept: f.newSpool()}
	defer change.kept.Close()
	if err := change.run(readable); err != nil {
		return wanted.reverted(file, info, err)
	}
	if wanted.setMode && wanted.mode&(syscall.S_ISUID|syscall.S_ISGID) != 0 { // writing clears these bits
		return wanted.applyTo(file)
	}
	return nil
}

// applyTo is apply for an open file.
func (c checked) applyTo(file *os.File) error {
	if c.uid >= 0 || c.gid >= 0 {
		if err := file.Chown(c.uid, c.gid); err != nil {
			return err
		}
	}
	if !c.setMode {
		return nil
	}
	return sys.PathError("chmod", file.Name(), syscall.Fchmod(int(file.Fd()), c.mode))
}

// reverted restores the former owner and mode of a file after a failure, and returns the failure.
func (c checked) reverted(file *os.File, former fs.FileInfo, cause error) error {
	stat, ok := former.Sys().(*syscall.Stat_t)
	if !ok {
		return cause
	}
	back := checked{mode: stat.Mode & 0o7777, setMode: c.setMode, uid: -1, gid: -1}
	if c.uid >= 0 {
		back.uid = int(stat.Uid)
	}
	if c.gid >= 0 {
		back.gid = int(stat.Gid)
	}
	if err := back.applyTo(file); err != nil {
		return fmt.Errorf("%s; owner or mode could not be put back: %s", sys.Explain(cause), sys.Reason(err))
	}
	return cause
}

// openExisting opens a file for writing, and also for reading if that is permitted. It never waits for a FIFO.
func openExisting(path string) (file *os.File, readable bool, err error) {
	const flags = syscall.O_NONBLOCK | syscall.O_NOFOLLOW
	file, err = os.OpenFile(path, os.O_RDWR|flags, 0)
	if !errors.Is(err, fs.ErrPermission) {
		return file, err == nil, err
	}
	file, err = os.OpenFile(path, os.O_WRONLY|flags, 0)
	return file, false, err
}

// overwriting is the state of one change of a file in place.
type overwriting struct {
	file   *os.File
	former int64 // size before the change
	next   content
	kept   *spool // the old content that is overwritten; empty if the file cannot be read
}

func (o *overwriting) run(readable bool) error {
	overlap := min(o.former, o.next.length())
	if readable {
		if _, err := io.Copy(o.kept, io.NewSectionReader(o.file, 0, overlap)); err != nil {
			return err
		}
	}
	if _, err := o.put(o.next, o.former, o.next.length()); err != nil {
		return o.undo(err, 0)
	}
	written, err := o.put(o.next, 0, overlap)
	if err != nil {
		return o.undo(err, written)
	}
	// Some file systems report only at this point that there is no space.
	if err := o.file.Sync(); err != nil && !unsupported(err) {
		return o.undo(err, overlap)
	}
	if o.next.length() >= o.former {
		return nil
	}
	if err := o.file.Truncate(o.next.length()); err != nil {
		return o.undo(err, overlap)
	}
	return nil
}

// put copies a range of some content to the same range of the file.
func (o *overwriting) put(from io.ReaderAt, begin, end int64) (int64, error) {
	if end <= begin {
		return 0, nil
	}
	written, err := io.Copy(io.NewOffsetWriter(o.file, begin), io.NewSectionReader(from, begin, end-begin))
	if err != nil {
		return written, err
	}
	if written < end-begin {
		return written, io.ErrUnexpectedEOF
	}
	return written, nil
}

// undo restores the former end of the file and that part of the old content which was overwritten. It writes no other
// part, because that could need space. It returns an error with the cause and with the result of the restoration.
func (o *overwriting) undo(cause error, written int64) error {
	failed := o.file.Truncate(o.former)
	restorable := min(written, o.kept.size)
	if _, err := o.put(o.kept, 0, restorable); failed == nil {
		failed = err
	}
	switch {
	case failed != nil:
		return fmt.Errorf("%s: writing in place failed: %s; the file is damaged, as its content could not be put back: %s",
			o.file.Name(), sys.Reason(cause), sys.Reason(failed))
	case restorable < written:
		return fmt.Errorf("%s: writing in place failed: %s; the file is damaged, as its content could not be read before",
			o.file.Name(), sys.Reason(cause))
	}
	return fmt.Errorf("%s: writing in place failed: %s; the file is as it was", o.file.Name(), sys.Reason(cause))
}

// unsupported reports whether an error means that a file system does not support an operation.
func unsupported(err error) bool {
	return errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EROFS)
}

package files

// Writing a file in place, where no other file can take its name: the directory refuses
// new files or the renaming, or the file is a mount point.
//
// Invariants
//   - The new content is complete before the file is opened.
//   - The order of writing is: what is beyond the old end, what overlaps, the new end. Only
//     the first needs space on common file systems, and undoing it is a truncation.
//   - The overwritten content is saved before. When a write fails, the old content is restored;
//     if that fails as well, the error says so.
//
// It is not atomic: a reader meanwhile may see a mixture, and so may everything after the
// process or the machine has died in the middle.

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"sallyport.dev/execd/internal/sys"
)

// content is what a file is to hold.
type content interface {
	io.ReaderAt
	length() int64
}

// fileContent is content that is in a file.
type fileContent struct {
	*os.File
	size int64
}

func (c fileContent) length() int64 { return c.size }

// overwrite gives an existing file new content and then, if wanted, another owner and mode.
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
	// Metadata first: a refused chown or chmod must not leave new content behind, and
	// content for fewer readers must not be visible to more.
	if err := wanted.applyTo(file); err != nil {
		return wanted.reverted(file, info, err)
	}
	change := overwriting{file: file, former: info.Size(), next: next, kept: f.newSpool()}
	defer change.kept.Close()
	if err := change.run(readable); err != nil {
		return wanted.reverted(file, info, err)
	}
	if wanted.setMode && wanted.mode&(syscall.S_ISUID|syscall.S_ISGID) != 0 { // writing clears them
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

// reverted gives a file its former owner and mode after a failure, which it returns.
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

// openExisting opens for reading as well where that is allowed. It never waits for a FIFO.
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
	former int64 // size before
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
	// Some file systems report only now that there was no space.
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

// put copies a part of some content to the same place of the file.
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

// undo puts back the former end and the written bytes of the old content: those have their
// space already, others might need some. It returns the cause and what it could not undo.
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

// unsupported reports that a file system does not know an operation.
func unsupported(err error) bool {
	return errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EROFS)
}

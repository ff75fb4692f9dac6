package main

// Replacing the content of a file (contract 9.2 replace, 9.3 upload).
//
// Invariants
//   - Readers see the old content or the new, never a part: write beside, rename.
//   - Where the directory or a mount forbids that, an existing file is written in place.
//   - An existing file keeps owner and mode unless told otherwise; a link is
//     followed to its target; only regular files are replaced.
//   - Content is streamed to the target's own directory, never kept in memory.

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

const linkLimit = 40

// targetOf follows a link at the end of a path, dangling ones too.
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
		link, err := os.Readlink(path)
		if err != nil {
			return "", nil, err
		}
		if !filepath.IsAbs(link) {
			// Not cleaned: ".." after a linked directory is the kernel's to resolve.
			link = filepath.Dir(path) + "/" + link
		}
		path = link
	}
	return "", nil, syscallError("open", path, syscall.ELOOP)
}

// write replaces path with what produce writes. keep tells produce's verdict:
// false leaves the file as it is.
func (f *Files) write(path string, wanted checked, produce func(io.Writer) (keep bool, err error)) error {
	target, existing, err := targetOf(path)
	if err != nil {
		return err
	}
	if existing != nil && !existing.Mode().IsRegular() {
		return errors.New("not a regular file: " + path)
	}
	temporary, err := createBeside(target)
	if err != nil {
		if existing != nil && (errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS)) {
			return f.writeInPlace(target, wanted, produce)
		}
		return err
	}
	defer os.Remove(temporary.Name()) // gone already after the rename
	defer temporary.Close()
	keep, err := produce(temporary)
	if err != nil || !keep {
		return err
	}
	if err := f.settle(temporary, existing, wanted); err != nil {
		return err
	}
	err = os.Rename(temporary.Name(), target)
	if existing != nil && (errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EXDEV)) { // a mount point
		if _, err := temporary.Seek(0, io.SeekStart); err != nil {
			return err
		}
		return f.writeInPlace(target, wanted, func(w io.Writer) (bool, error) {
			_, err := io.Copy(w, temporary)
			return true, err
		})
	}
	return err
}

// createBeside makes a private file in the target's directory.
func createBeside(target string) (*os.File, error) {
	var random [12]byte
	rand.Read(random[:])
	name := filepath.Dir(target) + "/.execd-" + hex.EncodeToString(random[:])
	return os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
}

// settle gives a new file its owner and mode before anybody can see it.
func (f *Files) settle(file *os.File, existing fs.FileInfo, wanted checked) error {
	mode := uint32(0o777 &^ f.umask)
	uid, gid := -1, -1
	if existing != nil {
		if stat, ok := existing.Sys().(*syscall.Stat_t); ok {
			mode = stat.Mode & 0o7777
			if int(stat.Uid) != os.Geteuid() || int(stat.Gid) != os.Getegid() {
				// Without the privilege the file becomes the daemon's, as with any editor.
				_ = file.Chown(int(stat.Uid), int(stat.Gid))
			}
		}
	}
	if wanted.uid >= 0 {
		uid = wanted.uid
	}
	if wanted.gid >= 0 {
		gid = wanted.gid
	}
	if uid >= 0 || gid >= 0 {
		if err := file.Chown(uid, gid); err != nil {
			return err
		}
	}
	if wanted.setMode {
		mode = wanted.mode
	}
	return syscallError("chmod", file.Name(), syscall.Fchmod(int(file.Fd()), mode))
}

func (f *Files) writeInPlace(target string, wanted checked, produce func(io.Writer) (bool, error)) error {
	file, err := os.OpenFile(target, os.O_WRONLY|os.O_TRUNC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	_, err = produce(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return wanted.apply(target)
}

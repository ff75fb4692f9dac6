package main

// POST /files/mv (contract 9.2).
//
// Invariants
//   - Moving never overwrites; across devices the copy is complete before the
//     source is removed.

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

type moveRequest struct {
	Source      string `json:"src"`
	Destination string `json:"dest"`
}

func (f *Files) move(w http.ResponseWriter, r *http.Request) {
	var request []moveRequest
	err := decodeJSON(w, r, fileBodyLimit, &request)
	for _, item := range request {
		if err != nil {
			break
		}
		var from, to string
		if from, err = f.expand(item.Source); err == nil {
			if to, err = f.expand(item.Destination); err == nil {
				err = moveOne(from, to)
			}
		}
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeEmpty(w)
}

func moveOne(from, to string) error {
	if _, err := os.Lstat(from); err != nil {
		return fileProblem(err)
	}
	if _, err := os.Lstat(to); err == nil {
		return errors.New("destination exists: " + to)
	}
	if from == "/" || strings.HasPrefix(to+"/", from+"/") {
		return errors.New("cannot move a directory into itself: " + from)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o777); err != nil {
		return err
	}
	err := renameExclusive(from, to)
	if errors.Is(err, syscall.EXDEV) {
		if err := copyTree(from, to); err != nil {
			return errors.Join(err, os.RemoveAll(to))
		}
		return os.RemoveAll(from)
	}
	return syscallError("rename", from, err)
}

// copyTree copies files, directories and links with mode, owner and time.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		target := to + strings.TrimPrefix(path, from)
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err == nil {
				err = os.Symlink(link, target)
			}
			if err != nil {
				return err
			}
			return ownLike(target, info, true)
		case info.IsDir():
			if err := os.Mkdir(target, 0o700); err != nil {
				return err
			}
			return ownLike(target, info, false)
		case info.Mode().IsRegular():
			if err := copyFile(path, target); err != nil {
				return err
			}
			if err := ownLike(target, info, false); err != nil {
				return err
			}
			return os.Chtimes(target, info.ModTime(), info.ModTime())
		}
		return errors.New("cannot move a special file across devices: " + path)
	})
}

func copyFile(from, to string) error {
	source, _, err := openRegular(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(target, source)
	return errors.Join(err, target.Close())
}

func ownLike(path string, info fs.FileInfo, link bool) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	_ = os.Lchown(path, int(stat.Uid), int(stat.Gid)) // needs privilege; like mv without it
	if link {
		return nil
	}
	return syscallError("chmod", path, syscall.Chmod(path, stat.Mode&0o7777))
}

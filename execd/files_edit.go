package main

// POST /files/replace and POST /files/mv (contract 9.2).
//
// Invariants
//   - Replacing is byte-wise and streamed; a file without a match is not touched.
//   - Moving never overwrites; across devices the copy is complete before the
//     source is removed.

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

type replacement struct {
	Old string `json:"old"`
	New string `json:"new"`
}

func (f *Files) replace(w http.ResponseWriter, r *http.Request) {
	query, err := parseQuery(r)
	var request map[string]replacement
	if err == nil {
		err = decodeJSON(w, r, fileBodyLimit, &request)
	}
	names := make([]string, 0, len(request))
	for name, change := range request {
		if change.Old == "" && err == nil {
			err = badRequest("old must not be empty")
		}
		names = append(names, name)
	}
	slices.Sort(names)
	type count struct {
		Replaced int64 `json:"replacedCount"`
	}
	counts := map[string]count{}
	for _, name := range names {
		if err != nil {
			break
		}
		var path string
		if path, err = f.expand(name); err == nil {
			var replaced int64
			replaced, err = f.replaceIn(path, []byte(request[name].Old), []byte(request[name].New))
			counts[name] = count{replaced}
		}
	}
	switch {
	case err != nil:
		writeError(w, err)
	case query.Get("verbose") == "true":
		writeJSON(w, http.StatusOK, counts)
	default:
		writeEmpty(w)
	}
}

func (f *Files) replaceIn(path string, from, to []byte) (count int64, err error) {
	file, _, err := openRegular(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	// Count first: most files of a search-and-replace have no match.
	if count, err = substitute(io.Discard, file, from, to); err != nil || count == 0 {
		return 0, err
	}
	if _, err = file.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	err = f.write(path, checked{uid: -1, gid: -1}, func(w io.Writer) (bool, error) {
		var err error
		count, err = substitute(w, file, from, to)
		return true, err
	})
	return count, err
}

// substitute copies with every occurrence replaced, in a window of bounded size.
func substitute(w io.Writer, r io.Reader, from, to []byte) (count int64, err error) {
	buffer := make([]byte, 0, max(256<<10, 2*len(from)))
	for {
		n, err := r.Read(buffer[len(buffer):cap(buffer)])
		buffer = buffer[:len(buffer)+n]
		if err != nil && !errors.Is(err, io.EOF) {
			return count, err
		}
		ended, rest := err != nil, buffer
		for {
			at := bytes.Index(rest, from)
			if at < 0 {
				break
			}
			if _, err := w.Write(rest[:at]); err != nil {
				return count, err
			}
			if _, err := w.Write(to); err != nil {
				return count, err
			}
			rest = rest[at+len(from):]
			count++
		}
		sure := len(rest) // what cannot be the beginning of a match
		if !ended {
			sure = max(0, len(rest)-len(from)+1)
		}
		if _, err := w.Write(rest[:sure]); err != nil {
			return count, err
		}
		if ended {
			return count, nil
		}
		buffer = buffer[:copy(buffer[:cap(buffer)], rest[sure:])]
	}
}

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

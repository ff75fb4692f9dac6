package files

// Reading directories of any size in bounded memory and lexical order.
//
// Invariants
//   - A directory is read in batches. If it is large, memory holds only its smallest names. After these are used, the
//     directory is read again for the next ones. So a larger directory needs more time, not more memory.
//   - No descriptor is held while an entry is used. A directory is never opened through a link.
//   - Reading stops when the context is done.

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
)

const (
	nameBatch    = 1024
	nameOverhead = 40 // bytes of an entry without its name
	heldMinimum  = 64 // entries of a directory that are always held, even if no bytes are left
)

// nameEntry is an entry of a directory.
type nameEntry struct {
	name      string
	directory bool
}

func (e nameEntry) size() int { return len(e.name) + nameOverhead }

// nameReader reads directories for one walk.
type nameReader struct {
	ctx  context.Context
	left int // bytes that can still be held, for all levels of the walk together
}

// unreadable is the error of a directory that cannot be read.
type unreadable struct{ error }

func (u unreadable) Unwrap() error { return u.error }

// holder returns whether an entry of a directory is to be used. It is called for the entries in any order, and possibly
// several times for one entry: first is true in the first reading of the directory. An error ends the reading.
type holder func(entry nameEntry, first bool) (bool, error)

// read calls use, in lexical order, for each entry that hold accepts.
func (n *nameReader) read(directory string, hold holder, use func(nameEntry) error) error {
	for after, more := "", true; more; {
		var held []nameEntry
		var err error
		if held, more, err = n.smallest(directory, after, hold); err != nil {
			return err
		}
		size := sizeOf(held)
		n.left -= size
		for _, entry := range held {
			if err := n.ctx.Err(); err != nil {
				return err
			}
			if err := use(entry); err != nil {
				return err
			}
			after = entry.name
		}
		n.left += size
	}
	return nil
}

// smallest returns, in order, the smallest entries after a name. It returns as many as fit into half of the bytes that
// can still be held. more reports whether other entries follow.
func (n *nameReader) smallest(directory, after string, hold holder) (held []nameEntry, more bool, err error) {
	file, err := openDirectory(directory)
	if err != nil {
		return nil, false, unreadable{err}
	}
	defer file.Close()
	first, room, size := after == "", n.left/2, 0
	below := "" // names that are not less than this do not fit
	for {
		if err := n.ctx.Err(); err != nil {
			return nil, false, err
		}
		batch, err := file.ReadDir(nameBatch)
		for _, item := range batch {
			entry := nameEntry{item.Name(), item.IsDir()}
			wanted, err := hold(entry, first)
			if err != nil {
				return nil, false, err
			}
			if !wanted || entry.name <= after {
				continue
			}
			if below != "" && entry.name >= below {
				continue
			}
			entry.name = strings.Clone(entry.name)
			held = append(held, entry)
			size += entry.size()
		}
		ended := errors.Is(err, io.EOF)
		if err != nil && !ended {
			return nil, false, unreadable{err}
		}
		if ended || size > 2*room && len(held) > 2*heldMinimum {
			slices.SortFunc(held, func(a, b nameEntry) int { return strings.Compare(a.name, b.name) })
			kept := fitting(held, room)
			if kept < len(held) {
				below = held[kept].name
				clear(held[kept:])
				held = held[:kept]
			}
			size = sizeOf(held)
		}
		if ended {
			return held, below != "", nil
		}
	}
}

// fitting returns the number of entries that fit into room bytes. It allows at least heldMinimum entries.
func fitting(entries []nameEntry, room int) int {
	for i, entry := range entries {
		if room -= entry.size(); room < 0 && i >= heldMinimum {
			return i
		}
	}
	return len(entries)
}

func sizeOf(entries []nameEntry) (size int) {
	for _, entry := range entries {
		size += entry.size()
	}
	return size
}

// openDirectory opens a directory. It never follows a link at the end of the path and never blocks.
func openDirectory(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
}

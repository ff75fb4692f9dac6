package stream

// What background commands have written, as far as it is kept.
//
// Invariants
//   - An offset is a number of bytes that the command has written, whatever was dropped.
//   - One log is bounded, and all logs of a store together; what is newer is kept. Where all
//     together are too many bytes, the largest log gives its oldest first.
//   - Memory, where there is no file system, counts for more than a disk.
//   - A writer never waits for a reader, and never fails: what no file takes is dropped.
//   - The files have no names: no other process can open or delete them, and they go with
//     the daemon.

import (
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"unicode/utf8"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/sys"
)

const (
	outputEach   = 64 << 20 // bytes kept of a command
	outputTotal  = 1 << 30  // bytes kept of all
	outputPiece  = 4 << 20  // bytes of one file, by weight
	outputPieces = 32       // files of one log; there are gaps between some after a disk was full
	outputCopy   = 64 << 10
	outputPage   = 16 << 20
	pageTries    = 8

	// memoryWeight is as how many bytes on a disk a byte in memory counts.
	memoryWeight = 16
)

// Store bounds logs together.
type Store struct {
	Each, Total, Piece int64

	mutex sync.Mutex // also guards all logs; never held while a file is read or written
	kept  int64      // bytes, by weight, those that are being written included
	logs  map[*Log]struct{}
}

// NewStore has the bounds of a daemon.
func NewStore() *Store {
	return &Store{Each: outputEach, Total: outputTotal, Piece: outputPiece, logs: map[*Log]struct{}{}}
}

// Log has one writer at a time and any number of readers.
type Log struct {
	store  *Store
	create func() (file *os.File, weight int64, err error)

	// Guarded by the mutex of the store.
	pieces  []*piece // oldest first
	written int64    // by the command
	closed  bool
}

// piece holds the bytes of a log from begin on.
type piece struct {
	file        *os.File
	weight      int64
	begin, size int64
}

func (f *piece) end() int64 { return f.begin + f.size }

// Open makes a log; it has no file before there is a byte.
func (s *Store) Open(create func() (*os.File, int64, error)) *Log {
	log := &Log{store: s, create: create}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.logs[log] = struct{}{}
	return log
}

// kept is what a log counts for; the lock is held.
func (l *Log) kept() (sum int64) {
	for _, piece := range l.pieces {
		sum += piece.size * piece.weight
	}
	return sum
}

// dropOldest gives up the oldest file that has something; the lock is held.
func (l *Log) dropOldest() (dropped bool) {
	for len(l.pieces) > 0 && !dropped {
		oldest := l.pieces[0]
		l.pieces = slices.Delete(l.pieces, 0, 1)
		l.store.kept -= oldest.size * oldest.weight
		oldest.file.Close() // a read or write under way ends first
		dropped = oldest.size > 0
	}
	return dropped
}

// reserve makes room for what is about to be written; the lock is held.
func (l *Log) reserve(weight int64) bool {
	for l.kept()+weight > l.store.Each && l.dropOldest() {
	}
	for l.store.kept+weight > l.store.Total {
		var largest *Log
		var most int64
		for log := range l.store.logs {
			if kept := log.kept(); kept > most {
				largest, most = log, kept
			}
		}
		if largest == nil || !largest.dropOldest() {
			return false
		}
	}
	l.store.kept += weight
	return true
}

// Write takes everything; what cannot be kept is dropped.
func (l *Log) Write(data []byte) (int, error) {
	for rest := data; len(rest) > 0; {
		rest = rest[l.put(rest):]
	}
	return len(data), nil
}

// put keeps or drops the beginning of some data, and returns how much that was.
func (l *Log) put(data []byte) int {
	last := l.last()
	l.store.mutex.Lock()
	if last == nil {
		l.written += int64(len(data))
		l.store.mutex.Unlock()
		return len(data)
	}
	data = data[:min(int64(len(data)), l.store.Piece/last.weight-last.size)]
	weight := int64(len(data)) * last.weight
	room := l.reserve(weight)
	at := last.size
	l.store.mutex.Unlock()

	n := 0
	if room {
		n, _ = last.file.WriteAt(data, at) // which also fails where the file was dropped meanwhile
	}
	l.store.mutex.Lock()
	defer l.store.mutex.Unlock()
	l.written += int64(len(data))
	if room {
		if !slices.Contains(l.pieces, last) {
			n = 0
		}
		last.size += int64(n)
		l.store.kept -= weight - int64(n)*last.weight
	}
	if n < len(data) && len(l.pieces) > 1 {
		l.dropOldest() // the disk is full: what comes next is worth more
	}
	return len(data)
}

// last is the file that takes the next byte, nil if there is none to be had.
func (l *Log) last() *piece {
	l.store.mutex.Lock()
	if l.closed {
		l.store.mutex.Unlock()
		return nil
	}
	if n := len(l.pieces); n > 0 {
		last := l.pieces[n-1]
		if last.size == 0 {
			last.begin = l.written
		}
		if last.end() == l.written && last.size < l.store.Piece/last.weight {
			l.store.mutex.Unlock()
			return last
		}
	}
	l.store.mutex.Unlock()
	file, weight, err := l.create()
	if err != nil {
		return nil
	}
	l.store.mutex.Lock()
	defer l.store.mutex.Unlock()
	if l.closed {
		file.Close()
		return nil
	}
	if len(l.pieces) >= outputPieces {
		l.dropOldest()
	}
	added := &piece{file: file, weight: weight, begin: l.written}
	l.pieces = append(l.pieces, added)
	return added
}

// Close gives everything up; the writer may go on.
func (l *Log) Close() {
	l.store.mutex.Lock()
	defer l.store.mutex.Unlock()
	for l.dropOldest() {
	}
	l.closed = true
	delete(l.store.logs, l)
}

// Files is how many descriptors a log holds.
func (l *Log) Files() int {
	l.store.mutex.Lock()
	defer l.store.mutex.Unlock()
	return len(l.pieces)
}

// Dropped is how much of what was written is not kept.
func (l *Log) Dropped() int64 {
	l.store.mutex.Lock()
	defer l.store.mutex.Unlock()
	sum := l.written
	for _, piece := range l.pieces {
		sum -= piece.size
	}
	return sum
}

// page is what an answer to a cursor holds: at most limit bytes without a gap. It begins at
// the cursor, or with the first whole character after it that was not dropped; it ends before
// a UTF-8 sequence that more output may complete.
func (l *Log) page(cursor, limit int64, running func() bool) (begin, end int64, err error) {
	for range pageTries {
		begin, end, err = l.pageNow(cursor, limit, running())
		if !errors.Is(err, errDropped) {
			break
		}
	}
	return begin, end, err
}

// pageNow is page for one look at the log. Whether the command runs was asked before: what is
// written after the last look belongs to the next page.
func (l *Log) pageNow(cursor, limit int64, running bool) (begin, end int64, err error) {
	begin, end, open := l.span(cursor, limit, running)
	var edge [utf8.UTFMax - 1]byte
	if cursor < begin && begin < end {
		head := edge[:min(end-begin, int64(len(edge)))]
		if err := l.readFull(head, begin); err != nil {
			return 0, 0, err
		}
		for len(head) > 0 && !utf8.RuneStart(head[0]) {
			head, begin = head[1:], begin+1
		}
	}
	if open && begin < end {
		tail := edge[:min(end-begin, int64(len(edge)))]
		if err := l.readFull(tail, end-int64(len(tail))); err != nil {
			return 0, 0, err
		}
		end -= int64(IncompleteSuffix(tail))
	}
	return begin, end, nil
}

// span is page without regard to characters; open means that the byte after its end is there,
// or may yet come. It never is at a gap.
func (l *Log) span(cursor, limit int64, running bool) (begin, end int64, open bool) {
	l.store.mutex.Lock()
	defer l.store.mutex.Unlock()
	if cursor >= l.written {
		return cursor, cursor, false
	}
	begin, end = l.written, l.written
	for _, piece := range l.pieces {
		if piece.end() <= cursor || piece.size == 0 {
			continue
		}
		if begin == l.written {
			begin = max(cursor, piece.begin)
		} else if piece.begin != end {
			break
		}
		end = piece.end()
	}
	if end-begin > limit {
		return begin, begin + limit, true
	}
	return begin, end, end == l.written && running
}

// errDropped says that output was dropped while it was read.
var errDropped = errors.New("the output was dropped while it was read")

// ReadAt reads from one file.
func (l *Log) ReadAt(buffer []byte, offset int64) (int, error) {
	l.store.mutex.Lock()
	i := slices.IndexFunc(l.pieces, func(piece *piece) bool { return piece.begin <= offset && offset < piece.end() })
	if i < 0 {
		l.store.mutex.Unlock()
		return 0, errDropped
	}
	piece := *l.pieces[i]
	l.store.mutex.Unlock()
	n, err := piece.file.ReadAt(buffer[:min(int64(len(buffer)), piece.end()-offset)], offset-piece.begin)
	if errors.Is(err, os.ErrClosed) {
		return 0, errDropped
	}
	if n > 0 {
		return n, nil
	}
	return 0, err
}

func (l *Log) readFull(buffer []byte, offset int64) error {
	for len(buffer) > 0 {
		n, err := l.ReadAt(buffer, offset)
		if err != nil {
			return err
		}
		buffer, offset = buffer[n:], offset+int64(n)
	}
	return nil
}

// CopyTo writes a page in pieces; only the first failure to read is returned.
func (l *Log) copyTo(w io.Writer, begin, end int64) error {
	buffer := make([]byte, min(outputCopy, end-begin))
	for begin < end {
		n, err := l.ReadAt(buffer[:min(int64(len(buffer)), end-begin)], begin)
		if err != nil {
			return err
		}
		if _, err := w.Write(buffer[:n]); err != nil {
			return nil
		}
		begin += int64(n)
	}
	return nil
}

// NewFile makes a nameless file in the first directory that allows it;
// without any it is a file in memory.
func NewFile() (file *os.File, weight int64, err error) {
	for _, directory := range []string{os.TempDir(), "/tmp", "/var/tmp", "/dev/shm", "/"} {
		if file, err = NamelessFile(directory); err == nil {
			return file, weightOf(file), nil
		}
	}
	file, err = sys.MemoryFile()
	return file, memoryWeight, err
}

// weightOf returns what a byte counts: a file in memory weighs more than one on a disk.
func weightOf(file *os.File) int64 {
	const tmpfs, ramfs = 0x01021994, 0x858458f6
	var system syscall.Statfs_t
	if err := syscall.Fstatfs(int(file.Fd()), &system); err != nil || system.Type == tmpfs || system.Type == ramfs {
		return memoryWeight
	}
	return 1
}

// NamelessFile is on the file system of a directory, and in no directory.
func NamelessFile(directory string) (*os.File, error) {
	file, err := os.CreateTemp(directory, ".opensandbox-execd-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file.Name()); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// Serve answers with the output of a background run from a cursor on. Two headers begin
// with prefix: CURSOR, where the next page begins, and DROPPED, how many bytes are missing
// between the given cursor and this page.
func (l *Log) Serve(w http.ResponseWriter, r *http.Request, running func() bool, prefix string) {
	cursor, err := strconv.ParseInt(r.URL.Query().Get("cursor"), 10, 64)
	if err != nil {
		cursor = 0
	}
	if cursor < 0 {
		httpx.WriteError(w, httpx.BadRequest("cursor must not be negative"))
		return
	}
	begin, end, err := l.page(cursor, outputPage, running)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set(prefix+"CURSOR", strconv.FormatInt(end, 10))
	if begin > cursor {
		w.Header().Set(prefix+"DROPPED", strconv.FormatInt(begin-cursor, 10))
	}
	w.Header().Set("Content-Length", strconv.FormatInt(end-begin, 10))
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush() // output may be dropped before its first byte is read: then too there was an answer
	if l.copyTo(w, begin, end) != nil {
		panic(http.ErrAbortHandler) // a transfer that is cut off, not a short page
	}
}

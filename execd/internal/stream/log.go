package stream

// Logs: the kept output of background commands.
//
// Invariants
//   - An offset counts all bytes that the command has written, including the dropped ones.
//   - Each log is bounded, and so are all logs of a store together; the newest bytes are kept. If all logs together
//     exceed the bound, the largest log drops its oldest bytes first.
//   - A byte in a memory file counts for more than a byte on a disk.
//   - A writer never waits for a reader, and never fails: bytes that cannot be written to a file are dropped.
//   - The files have no names, so that no other process can open or delete them. They end with the daemon.

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
	outputEach   = 64 << 20 // weighted bytes kept for one command
	outputTotal  = 1 << 30  // weighted bytes kept for all commands
	outputPiece  = 4 << 20  // weighted bytes of one file
	outputPieces = 32       // files of one log; after a disk was full, there can be gaps between files
	outputCopy   = 64 << 10
	outputPage   = 16 << 20
	pageTries    = 8

	// memoryWeight is the weight of a byte in memory; a byte on a disk has the weight 1.
	memoryWeight = 16
)

// Store is a set of logs with common bounds.
type Store struct {
	Each, Total, Piece int64

	mutex sync.Mutex // also guards all logs; never held while a file is read or written
	kept  int64      // weighted bytes, including those that are being written
	logs  map[*Log]struct{}
}

// NewStore makes a store with the bounds of a daemon.
func NewStore() *Store {
	return &Store{Each: outputEach, Total: outputTotal, Piece: outputPiece, logs: map[*Log]struct{}{}}
}

// Log is the kept output of one command. It has one writer at a time and any number of readers.
type Log struct {
	store  *Store
	create func() (file *os.File, weight int64, err error)

	// Guarded by the mutex of the store.
	pieces  []*piece // oldest first
	written int64    // bytes written by the command
	closed  bool
}

// piece holds the bytes of a log from begin on.
type piece struct {
	file        *os.File
	weight      int64
	begin, size int64
}

func (f *piece) end() int64 { return f.begin + f.size }

// Open makes a log. create makes its files; the log has no file before the first byte is written.
func (s *Store) Open(create func() (*os.File, int64, error)) *Log {
	log := &Log{store: s, create: create}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.logs[log] = struct{}{}
	return log
}

// kept returns the weighted number of bytes of a log. The caller holds the lock.
func (l *Log) kept() (sum int64) {
	for _, piece := range l.pieces {
		sum += piece.size * piece.weight
	}
	return sum
}

// dropOldest closes files from the oldest on, until one with content is dropped. The caller holds the lock.
func (l *Log) dropOldest() (dropped bool) {
	for len(l.pieces) > 0 && !dropped {
		oldest := l.pieces[0]
		l.pieces = slices.Delete(l.pieces, 0, 1)
		l.store.kept -= oldest.size * oldest.weight
		oldest.file.Close() // the descriptor stays open until a concurrent read or write has ended
		dropped = oldest.size > 0
	}
	return dropped
}

// reserve reserves room for a number of weighted bytes, and drops old bytes for it. It returns false if there is not
// enough room. The caller holds the lock.
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

// Write always accepts all of data; bytes that cannot be kept are dropped.
func (l *Log) Write(data []byte) (int, error) {
	for rest := data; len(rest) > 0; {
		rest = rest[l.put(rest):]
	}
	return len(data), nil
}

// put keeps or drops the beginning of data, and returns the number of bytes that it has processed.
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
		n, _ = last.file.WriteAt(data, at) // also fails if the file was dropped meanwhile
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
		l.dropOldest() // the disk is full: make room, because later output has priority
	}
	return len(data)
}

// last returns the file for the next byte. It returns nil if no file can be made, or the log is closed.
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

// Close drops all bytes of the log. The writer can continue; its output is dropped.
func (l *Log) Close() {
	l.store.mutex.Lock()
	defer l.store.mutex.Unlock()
	for l.dropOldest() {
	}
	l.closed = true
	delete(l.store.logs, l)
}

// Files returns the number of descriptors that a log holds.
func (l *Log) Files() int {
	l.store.mutex.Lock()
	defer l.store.mutex.Unlock()
	return len(l.pieces)
}

// Dropped returns the number of written bytes that are not kept.
func (l *Log) Dropped() int64 {
	l.store.mutex.Lock()
	defer l.store.mutex.Unlock()
	sum := l.written
	for _, piece := range l.pieces {
		sum -= piece.size
	}
	return sum
}

// page returns the offsets of the answer to a cursor: at most limit bytes without a gap. The page begins at the cursor,
// or at the first whole character after it that was not dropped. It ends before a UTF-8 sequence that later output can
// complete.
func (l *Log) page(cursor, limit int64, running func() bool) (begin, end int64, err error) {
	for range pageTries {
		begin, end, err = l.pageNow(cursor, limit, running())
		if !errors.Is(err, errDropped) {
			break
		}
	}
	return begin, end, err
}

// pageNow is one attempt of page. The caller determines running before the call, so that output which is written after
// that belongs to the next page.
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

// span is page without regard to UTF-8 sequences. open means that the next byte after end exists or can still be
// written; it is false if a gap follows.
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

var errDropped = errors.New("the output was dropped while it was read")

// ReadAt reads from one file, so that it can return fewer bytes than the buffer holds.
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

// copyTo writes a page in pieces. It returns an error only if reading fails; it ends without an error if writing fails.
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

// NewFile makes a nameless file in the first directory that allows it. If no directory allows it, the file is in
// memory.
func NewFile() (file *os.File, weight int64, err error) {
	for _, directory := range []string{os.TempDir(), "/tmp", "/var/tmp", "/dev/shm", "/"} {
		if file, err = NamelessFile(directory); err == nil {
			return file, weightOf(file), nil
		}
	}
	file, err = sys.MemoryFile()
	return file, memoryWeight, err
}

// weightOf returns the weight of a byte of a file: memoryWeight on a file system in memory, else 1.
func weightOf(file *os.File) int64 {
	const tmpfs, ramfs = 0x01021994, 0x858458f6
	var system syscall.Statfs_t
	if err := syscall.Fstatfs(int(file.Fd()), &system); err != nil || system.Type == tmpfs || system.Type == ramfs {
		return memoryWeight
	}
	return 1
}

// NamelessFile makes a file without a name, on the file system of a directory.
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

// Serve answers with the output of a background run from a cursor on. It sets two headers whose names begin with
// prefix: CURSOR is the offset of the next page, and DROPPED is the number of bytes that are missing between the given
// cursor and this page.
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
	_ = http.NewResponseController(w).Flush() // answer even if the output is dropped before it is read
	if l.copyTo(w, begin, end) != nil {
		panic(http.ErrAbortHandler) // break the transfer: a short page must not look complete
	}
}

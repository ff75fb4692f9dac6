package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"
)

func TestOutputOfABackgroundCommandIsBoundedAlsoForTheNewest(t *testing.T) {
	f := newCommandFixture(t)
	const size = 90_000_000
	id := f.run(object{"command": fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo end", size), "background": true}).id
	status := f.ended(id)
	equal(t, 0, *status.ExitCode)
	dropped, read, cursor := int64(0), int64(0), "0"
	for last := ""; cursor != last; {
		response := f.do("GET", "/command/"+id+"/logs?cursor="+cursor, nil)
		page, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		last, cursor = cursor, response.Header.Get("EXECD-COMMANDS-TAIL-CURSOR")
		if header := response.Header.Get("EXECD-COMMANDS-TAIL-DROPPED"); header != "" {
			number, _ := strconv.ParseInt(header, 10, 64)
			dropped += number
		}
		read += int64(len(page))
		if len(page) > 0 && cursor == strconv.Itoa(size+4) {
			equal(t, true, bytes.HasSuffix(page, []byte("xend\n")))
		}
	}
	equal(t, strconv.Itoa(size+4), cursor)
	equal(t, size+4, dropped+read)
	if kept := f.commands.records.outputs; read > kept.each || read < kept.each-2*kept.piece {
		t.Errorf("%d bytes are kept", read)
	}
	equal(t, dropped, status.OutputDropped)
}

// A log of small bounds, with files that take nothing now and then, against all that was written.
func TestALogKeepsTheNewestAndEveryCursorHasAnAnswer(t *testing.T) {
	directory := t.TempDir()
	for seed := range uint64(60) {
		draw := rand.New(rand.NewPCG(seed, 1))
		store := newOutputStore()
		store.each, store.total, store.piece = 1000, 2500, 200
		full := 0
		var logs [4]*outputLog
		var written [4][]byte
		for i := range logs {
			weight := []int64{1, 1, 4, 1}[i]
			logs[i] = store.open(func() (*os.File, int64, error) {
				if full > 0 {
					full--
					if full%2 == 0 {
						return nil, 0, syscall.EMFILE
					}
					file, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
					return file, weight, err
				}
				file, err := namelessFile(directory)
				return file, weight, err
			})
		}
		for range 300 {
			i := draw.IntN(len(logs))
			data := []byte(strings.Repeat([]string{"a", "é", "€", "😀"}[draw.IntN(4)], 1+draw.IntN(90)))
			data = data[:1+draw.IntN(len(data))]
			if draw.IntN(20) == 0 {
				full = draw.IntN(4)
			}
			n, err := logs[i].Write(data)
			if n != len(data) || err != nil {
				t.Fatal(n, err)
			}
			written[i] = append(written[i], data...)
			sum := int64(0)
			for j, log := range logs {
				if kept := log.kept(); kept > store.each {
					t.Fatal(seed, j, kept)
				}
				sum += log.kept()
				equal(t, int64(len(written[j])), log.written)
			}
			if sum != store.kept || sum > store.total {
				t.Fatal(seed, sum, store.kept)
			}
			checkPages(t, draw, logs[i], written[i])
		}
		for _, log := range logs {
			log.Close()
		}
		equal(t, 0, store.kept)
	}
}

func checkPages(t *testing.T, draw *rand.Rand, log *outputLog, written []byte) {
	t.Helper()
	running := draw.IntN(2) == 0
	cursor, missing := int64(0), int64(0)
	for {
		begin, end, err := log.page(cursor, 64, func() bool { return running })
		if err != nil || begin < cursor || end < begin || end-begin > 64 {
			t.Fatal(cursor, begin, end, err)
		}
		var page bytes.Buffer
		if err := log.copyTo(&page, begin, end); err != nil {
			t.Fatal(err)
		}
		equal(t, string(written[begin:end]), page.String())
		if begin > cursor && begin < end && !utf8.RuneStart(page.Bytes()[0]) {
			t.Fatal("a page begins inside a character")
		}
		missing += begin - cursor
		if end == cursor {
			break
		}
		cursor = end
	}
	if rest := int64(len(written)) - cursor; rest != 0 && (!running || rest >= utf8.UTFMax) {
		t.Fatalf("%d bytes are never answered", rest)
	}
	if dropped := log.dropped(); missing < dropped || missing > dropped+64*utf8.UTFMax {
		t.Fatal(missing, dropped)
	}
}

func TestACommandEndsWellWhereNothingOfItsOutputCanBeKept(t *testing.T) {
	f := newCommandFixture(t)
	f.commands.records.outputs.total = 0
	id := f.run(object{"command": "head -c 3000000 /dev/zero; exit 7", "background": true}).id
	status := f.ended(id)
	equal(t, 7, *status.ExitCode)
	equal(t, 3000000, status.OutputDropped)
	response := f.do("GET", "/command/"+id+"/logs", nil)
	page, _ := io.ReadAll(response.Body)
	equal(t, "0 3000000 3000000", fmt.Sprint(len(page), " ", response.Header.Get("EXECD-COMMANDS-TAIL-CURSOR"), " ", response.Header.Get("EXECD-COMMANDS-TAIL-DROPPED")))
}

func TestMemoryCountsForMoreThanADisk(t *testing.T) {
	file, err := memoryFile()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	equal(t, memoryWeight, weightOf(file))
	store := newOutputStore()
	log := store.open(func() (*os.File, int64, error) { file, err := memoryFile(); return file, memoryWeight, err })
	for range 64 {
		_, _ = log.Write(make([]byte, 1<<20))
	}
	kept := log.written - log.dropped()
	if kept > outputEach/memoryWeight || kept < outputEach/memoryWeight-outputPiece/memoryWeight {
		t.Error(kept)
	}
	log.Close()
}

func TestAPageIsWholeOrCutOffWhileItsOutputIsDropped(t *testing.T) {
	f := newCommandFixture(t)
	outputs := f.commands.records.outputs
	outputs.each, outputs.piece = 256<<10, 64<<10
	id := f.run(object{"command": "i=0; while [ $i -lt 40 ]; do seq -f %07g 1 20000; i=$((i+1)); done", "background": true}).id
	var group sync.WaitGroup
	for range 3 {
		group.Go(func() {
			for cursor := int64(0); ; {
				response := f.do("GET", "/command/"+id+"/logs?cursor="+strconv.FormatInt(cursor, 10), nil)
				page, err := io.ReadAll(response.Body)
				if err != nil { // cut off: ask again
					continue
				}
				next, _ := strconv.ParseInt(response.Header.Get("EXECD-COMMANDS-TAIL-CURSOR"), 10, 64)
				begin := next - int64(len(page))
				for i, c := range page {
					at := begin + int64(i)
					if expected := fmt.Sprintf("%07d\n", at/8%20000+1)[at%8]; c != expected {
						t.Errorf("at %d there is %q", at, c)
						return
					}
				}
				cursor = next
				if cursor == 40*20000*8 {
					return
				}
			}
		})
	}
	group.Wait()
}

func TestLeftoversAreBoundedAndTheSilentOneGoesFirst(t *testing.T) {
	f := newCommandFixture(t)
	const limit = 8
	f.commands.leftovers.limit = limit
	before := runtime.NumGoroutine()
	noisy := f.run(object{"command": "(while echo; do sleep 0.02; done) & echo $!", "background": true}).id
	_, text := f.call("GET", "/command/"+noisy+"/logs", "")
	eventually(t, "its pid", func() bool {
		_, text = f.call("GET", "/command/"+noisy+"/logs", "")
		return strings.TrimSpace(text) != ""
	})
	writer, err := strconv.Atoi(strings.Fields(text)[0])
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(writer, syscall.SIGKILL)
	var pids []int
	for i := range 40 {
		name := t.TempDir() + "/pid"
		f.run(object{"command": "sleep 60 & echo $! >" + name, "background": i%2 == 0})
		eventually(t, "its pid", func() bool { data, _ := os.ReadFile(name); return len(data) > 0 })
		pid, _ := strconv.Atoi(strings.TrimSpace(mustRead(t, name)))
		pids = append(pids, pid)
		defer syscall.Kill(pid, syscall.SIGKILL)
	}
	eventually(t, "they are as many as may be", func() bool { return f.commands.leftovers.count() == limit })
	for _, pid := range pids {
		equal(t, false, gone(pid))
	}
	equal(t, false, gone(writer))
	f.closeConnections()
	eventually(t, "no goroutine is left of the others", func() bool { return runtime.NumGoroutine() <= before+limit+8 })
	size := func() int { _, text := f.call("GET", "/command/"+noisy+"/logs", ""); return len(text) }
	now := size()
	eventually(t, "the one that writes is still read", func() bool { return size() > now })
}

func TestAnEndlessLeftoverIsReadSlowly(t *testing.T) {
	rest := newLeftovers()
	rest.pause = 20 * time.Millisecond
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	var mutex sync.Mutex
	sum := 0
	rest.keep(read, func(data []byte) {
		mutex.Lock()
		defer mutex.Unlock()
		sum += len(data)
	})
	_ = write.SetWriteDeadline(time.Now().Add(400 * time.Millisecond))
	for err = nil; err == nil; {
		_, err = write.Write(make([]byte, leftoverBuffer))
	}
	equal(t, true, errors.Is(err, os.ErrDeadlineExceeded))
	mutex.Lock()
	defer mutex.Unlock()
	if sum == 0 || sum > 21*leftoverBuffer {
		t.Error(sum)
	}
	write.Close()
}

package stream

import (
	"bytes"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"sallyport.dev/execd/internal/sys"
	"sallyport.dev/execd/internal/testkit"
)

// Compares logs with small bounds, some of whose files accept no bytes at times, with all bytes that were written.
func TestALogKeepsTheNewestAndEveryCursorHasAnAnswer(t *testing.T) {
	directory := t.TempDir()
	for seed := range uint64(60) {
		draw := rand.New(rand.NewPCG(seed, 1))
		store := NewStore()
		store.Each, store.Total, store.Piece = 1000, 2500, 200
		full := 0
		var logs [4]*Log
		var written [4][]byte
		for i := range logs {
			weight := []int64{1, 1, 4, 1}[i]
			logs[i] = store.Open(func() (*os.File, int64, error) {
				if full > 0 {
					full--
					if full%2 == 0 {
						return nil, 0, syscall.EMFILE
					}
					file, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
					return file, weight, err
				}
				file, err := NamelessFile(directory)
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
				if kept := log.kept(); kept > store.Each {
					t.Fatal(seed, j, kept)
				}
				sum += log.kept()
				testkit.Equal(t, int64(len(written[j])), log.written)
			}
			if sum != store.kept || sum > store.Total {
				t.Fatal(seed, sum, store.kept)
			}
			checkPages(t, draw, logs[i], written[i])
		}
		for _, log := range logs {
			log.Close()
		}
		testkit.Equal(t, 0, store.kept)
	}
}

func checkPages(t *testing.T, draw *rand.Rand, log *Log, written []byte) {
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
		testkit.Equal(t, string(written[begin:end]), page.String())
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
	if dropped := log.Dropped(); missing < dropped || missing > dropped+64*utf8.UTFMax {
		t.Fatal(missing, dropped)
	}
}

func TestMemoryCountsForMoreThanADisk(t *testing.T) {
	file, err := sys.MemoryFile()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	testkit.Equal(t, memoryWeight, weightOf(file))
	store := NewStore()
	log := store.Open(func() (*os.File, int64, error) { file, err := sys.MemoryFile(); return file, memoryWeight, err })
	for range 64 {
		_, _ = log.Write(make([]byte, 1<<20))
	}
	kept := log.written - log.Dropped()
	if kept > outputEach/memoryWeight || kept < outputEach/memoryWeight-outputPiece/memoryWeight {
		t.Error(kept)
	}
	log.Close()
}

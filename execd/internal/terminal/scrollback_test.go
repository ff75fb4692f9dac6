package terminal

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/testkit"
)

// plainScrollback is the model: every byte there ever was, with its kind.
type plainScrollback struct {
	limit int
	data  []byte
	kinds []byte
}

func (p *plainScrollback) add(kind byte, data []byte) {
	p.data = append(p.data, data...)
	p.kinds = append(p.kinds, bytes.Repeat([]byte{kind}, len(data))...)
}

func (p *plainScrollback) first() int64 { return int64(max(0, len(p.data)-p.limit)) }

// read is the longest output of one kind from an offset on.
func (p *plainScrollback) read(offset int64, most int) (kind byte, text []byte) {
	if offset < p.first() || offset >= int64(len(p.data)) {
		return 0, nil
	}
	end := offset
	for end < int64(len(p.data)) && end-offset < int64(most) && p.kinds[end] == p.kinds[offset] {
		end++
	}
	return p.kinds[offset], p.data[offset:end]
}

func TestAScrollbackShowsFromAnyOffsetWhatAPlainListShows(t *testing.T) {
	for seed := range uint64(24) {
		draw := rand.New(rand.NewPCG(seed, 1))
		limit := 64 << draw.IntN(5)
		kept, model := scrollback{limit: limit}, plainScrollback{limit: limit}
		most := 1 + draw.IntN(2*limit)
		pipes := draw.IntN(4) > 0
		for step := range 150 {
			kind := kindOutput
			if pipes && draw.IntN(2) == 0 {
				kind = kindError
			}
			data := make([]byte, draw.IntN(1+[]int{1, 3, 70, most}[draw.IntN(4)]))
			for i := range data {
				data[i] = byte(draw.Uint32())
			}
			kept.add(kind, data)
			model.add(kind, data)
			where := fmt.Sprintf("seed %d, step %d", seed, step)
			if kept.total != int64(len(model.data)) || kept.first() != model.first() {
				t.Fatalf("%s: %d to %d, not %d to %d", where, kept.first(), kept.total, model.first(), len(model.data))
			}
			for range 4 {
				checkOffset(t, where, &kept, &model, draw.Int64N(kept.total+2), make([]byte, 1+draw.IntN(most)))
			}
			checkOffset(t, where, &kept, &model, kept.first(), make([]byte, limit))
			checkOffset(t, where, &kept, &model, kept.total, make([]byte, limit))
		}
	}
}

// checkOffset compares one frame from an offset, all frames from there, and the replay.
func checkOffset(t *testing.T, where string, kept *scrollback, model *plainScrollback, offset int64, buffer []byte) {
	t.Helper()
	where = fmt.Sprintf("%s, offset %d", where, offset)
	from := min(max(offset, kept.first()), kept.total)
	if replay := kept.appendSince([]byte("head"), offset); !bytes.Equal(append([]byte("head"), model.data[from:]...), replay) {
		t.Fatalf("%s: another replay", where)
	}
	if kind, n := kept.read(offset, buffer); offset != from && (kind != 0 || n != 0) {
		t.Fatalf("%s: %d bytes that are not there", where, n)
	}
	for offset = from; offset < kept.total; {
		kind, n := kept.read(offset, buffer)
		expected, text := model.read(offset, len(buffer))
		if n == 0 || kind != expected || n > len(text) || !bytes.Equal(text[:n], buffer[:n]) {
			t.Fatalf("%s: at %d %d bytes of kind %d, not %d of kind %d", where, offset, n, kind, len(text), expected)
		}
		// A frame may end early only where the ring begins again.
		if n < len(text) && (offset+int64(n))%int64(kept.limit) != 0 {
			t.Fatalf("%s: at %d %d bytes, not %d", where, offset, n, len(text))
		}
		offset += int64(n)
	}
}

func TestTinyWritesToBothStreamsNeitherFillMemoryNorSlowAFrameDown(t *testing.T) {
	shell := newTerminal(&process.Launcher{})
	before := heapInUse()
	for i := range 3 * scrollbackLimit {
		shell.add([]byte{kindOutput, kindError}[i&1], []byte{byte(i)})
	}
	const most = scrollbackLimit + scrollbackLimit/8
	if held := len(shell.output.ring) + len(shell.output.marks)*int(unsafe.Sizeof(uint64(0))); held > most {
		t.Errorf("it holds %d bytes", held)
	}
	if grown := heapInUse() - before; grown > most+64<<10 {
		t.Errorf("the heap has grown by %d bytes", grown)
	}
	buffer := make([]byte, socketChunk)
	began, frames := time.Now(), 0
	for offset := shell.output.first(); offset < shell.output.total; frames++ {
		_, n := shell.output.read(offset, buffer)
		offset += int64(n)
	}
	testkit.Equal(t, scrollbackLimit, frames)
	t.Logf("%d frames in %s", frames, time.Since(began))
	if taken := time.Since(began); taken > 10*time.Second { // milliseconds; a search through a list takes hours
		t.Errorf("the frames took %s", taken)
	}
	runtime.KeepAlive(shell)
}

func TestATerminalThatSaidLittleHoldsLittle(t *testing.T) {
	small := scrollback{limit: scrollbackLimit}
	small.add(kindOutput, []byte("prompt"))
	testkit.Equal(t, true, cap(small.ring) <= 4<<10 && small.marks == nil)
}

// heapInUse is the size of all that is reachable.
func heapInUse() int64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

func BenchmarkScrollback(b *testing.B) {
	for _, size := range []int{1, 80, 32 << 10} {
		b.Run(fmt.Sprintf("write and frame of %d", size), func(b *testing.B) {
			written, buffer, data := scrollback{limit: scrollbackLimit}, make([]byte, socketChunk), make([]byte, size)
			b.SetBytes(int64(size))
			for i := 0; b.Loop(); i++ {
				written.add([]byte{kindOutput, kindError}[i&1], data)
				written.read(written.total-int64(size), buffer)
			}
		})
	}
}

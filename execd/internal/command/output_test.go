package command

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"sallyport.dev/execd/internal/testkit"
)

func TestOutputOfABackgroundCommandIsBoundedAlsoForTheNewest(t *testing.T) {
	f := newFixture(t)
	const size = 90_000_000
	id := f.Run(testkit.Object{"command": fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo end", size), "background": true}).ID
	status := f.Ended(id)
	testkit.Equal(t, 0, *status.ExitCode)
	dropped, read, cursor := int64(0), int64(0), "0"
	for last := ""; cursor != last; {
		response := f.Do("GET", "/command/"+id+"/logs?cursor="+cursor, nil)
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
			testkit.Equal(t, true, bytes.HasSuffix(page, []byte("xend\n")))
		}
	}
	testkit.Equal(t, strconv.Itoa(size+4), cursor)
	testkit.Equal(t, size+4, dropped+read)
	if kept := f.commands.records.outputs; read > kept.Each || read < kept.Each-2*kept.Piece {
		t.Errorf("%d bytes are kept", read)
	}
	testkit.Equal(t, dropped, status.OutputDropped)
}

func TestACommandEndsWellWhereNothingOfItsOutputCanBeKept(t *testing.T) {
	f := newFixture(t)
	f.commands.records.outputs.Total = 0
	id := f.Run(testkit.Object{"command": "head -c 3000000 /dev/zero; exit 7", "background": true}).ID
	status := f.Ended(id)
	testkit.Equal(t, 7, *status.ExitCode)
	testkit.Equal(t, 3000000, status.OutputDropped)
	response := f.Do("GET", "/command/"+id+"/logs", nil)
	page, _ := io.ReadAll(response.Body)
	testkit.Equal(t, "0 3000000 3000000", fmt.Sprint(len(page), " ", response.Header.Get("EXECD-COMMANDS-TAIL-CURSOR"), " ", response.Header.Get("EXECD-COMMANDS-TAIL-DROPPED")))
}

func TestAPageIsWholeOrCutOffWhileItsOutputIsDropped(t *testing.T) {
	f := newFixture(t)
	outputs := f.commands.records.outputs
	outputs.Each, outputs.Piece = 256<<10, 64<<10
	id := f.Run(testkit.Object{"command": "i=0; while [ $i -lt 40 ]; do seq -f %07g 1 20000; i=$((i+1)); done", "background": true}).ID
	var group sync.WaitGroup
	for range 3 {
		group.Go(func() {
			for cursor := int64(0); ; {
				response := f.Do("GET", "/command/"+id+"/logs?cursor="+strconv.FormatInt(cursor, 10), nil)
				page, err := io.ReadAll(response.Body)
				if err != nil { // the answer was aborted: ask again
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
	f := newFixture(t)
	const limit = 8
	f.commands.Leftovers.Limit = limit
	before := runtime.NumGoroutine()
	noisy := f.Run(testkit.Object{"command": "(while echo; do sleep 0.02; done) & echo $!", "background": true}).ID
	_, text := f.Call("GET", "/command/"+noisy+"/logs", "")
	testkit.Eventually(t, "its pid", func() bool {
		_, text = f.Call("GET", "/command/"+noisy+"/logs", "")
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
		f.Run(testkit.Object{"command": "sleep 60 & echo $! >" + name, "background": i%2 == 0})
		testkit.Eventually(t, "its pid", func() bool { data, _ := os.ReadFile(name); return len(data) > 0 })
		pid, _ := strconv.Atoi(strings.TrimSpace(testkit.MustRead(t, name)))
		pids = append(pids, pid)
		defer syscall.Kill(pid, syscall.SIGKILL)
	}
	testkit.Eventually(t, "they are as many as may be", func() bool { return f.commands.Leftovers.Count() == limit })
	for _, pid := range pids {
		testkit.Equal(t, false, gone(pid))
	}
	testkit.Equal(t, false, gone(writer))
	f.CloseConnections()
	testkit.Eventually(t, "no goroutine is left of the others", func() bool { return runtime.NumGoroutine() <= before+limit+8 })
	size := func() int { _, text := f.Call("GET", "/command/"+noisy+"/logs", ""); return len(text) }
	now := size()
	testkit.Eventually(t, "the one that writes is still read", func() bool { return size() > now })
}

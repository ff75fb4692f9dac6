package process

import (
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"sallyport.dev/execd/internal/testkit"
)

func TestAnEndlessLeftoverIsReadSlowly(t *testing.T) {
	rest := NewLeftovers()
	rest.pause = 20 * time.Millisecond
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	var mutex sync.Mutex
	sum := 0
	rest.Keep(read, func(data []byte) {
		mutex.Lock()
		defer mutex.Unlock()
		sum += len(data)
	})
	_ = write.SetWriteDeadline(time.Now().Add(400 * time.Millisecond))
	for err = nil; err == nil; {
		_, err = write.Write(make([]byte, leftoverBuffer))
	}
	testkit.Equal(t, true, errors.Is(err, os.ErrDeadlineExceeded))
	mutex.Lock()
	defer mutex.Unlock()
	if sum == 0 || sum > 21*leftoverBuffer {
		t.Error(sum)
	}
	write.Close()
}

package jupyter

// The interruption of a run of code.
//
// Invariants
//   - An interrupt affects the run that existed when it was requested, and no other one.
//   - It is delivered only while the kernel executes that run. SIGINT ends a kernel that is still
//     starting, because it has no handler yet. An idle one loses the interrupt, or applies it to the next run.
//   - A run that was not sent to the kernel is cancelled here, and the kernel is not affected.
//   - A kernel that does not end an interrupted run in time is ended, and its context with it.

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"sallyport.dev/execd/internal/httpx"
)

const (
	deafGrace      = 3 * time.Second
	interruptAgain = 250 * time.Millisecond
	replyGrace     = 500 * time.Millisecond
)

const interruptName = "KeyboardInterrupt"

var (
	errInterrupted = errors.New("the run was interrupted before it began")
	errUnanswered  = errors.New("the kernel has not replied to a run that was interrupted")
)

// event happens at most once.
type event struct {
	once sync.Once
	done chan struct{}
}

func newEvent() *event { return &event{done: make(chan struct{})} }

func (e *event) happen() { e.once.Do(func() { close(e.done) }) }

func (e *event) happened() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

// codeRun is the present activity of a context: a run of code, or reseeding.
type codeRun struct {
	stop       func() // ends it at once
	asked      *event // an interrupt is wanted
	begun      *event // the kernel executes the code
	over       *event
	unanswered *event // the kernel is idle after an interrupt, and the reply has not come
}

func newCodeRun(stop func()) *codeRun {
	return &codeRun{stop: stop, asked: newEvent(), begun: newEvent(), over: newEvent(), unanswered: newEvent()}
}

// idleWithoutReply waits a moment longer for the reply of an interrupted run. An interrupt that
// reaches a kernel of ipykernel just before the code, or just after it, prevents the reply.
func (r *codeRun) idleWithoutReply() {
	if r.asked.happened() {
		time.AfterFunc(replyGrace, r.unanswered.happen)
	}
}

// Interrupt ends the run of a context; false if there is no such context. It does not
// wait for the end of the run.
func (c *Contexts) Interrupt(w http.ResponseWriter, r *http.Request) bool {
	found := c.find(r.URL.Query().Get("id"))
	if found == nil {
		return false
	}
	c.mutex.Lock()
	running := found.running
	c.mutex.Unlock()
	if running != nil {
		running.asked.happen()
	}
	httpx.WriteEmpty(w)
	return true
}

// attend delivers the interrupt of a run, if one is requested. It returns after the end of the run
// and after the last call that delivers, so that the next run does not get this interrupt.
func (c *Contexts) attend(used *kernelContext, run *codeRun) {
	select {
	case <-run.over.done:
		return
	case <-run.asked.done:
	}
	deaf := time.NewTimer(deafGrace)
	defer deaf.Stop()
	select {
	case <-run.over.done:
		return
	case <-run.begun.done:
	case <-deaf.C:
		go c.drop(used)
		return
	}
	for {
		ctx, cancel := context.WithTimeout(context.Background(), deafGrace)
		_ = c.jupyter.interrupt(ctx, used.session.Kernel.ID) // a run that goes on is ended below
		cancel()
		var again <-chan time.Time
		if used.session.interruptedByMessage {
			// Such a kernel ignores the message if it still prepares the code (seen: JJava). A
			// signal is not repeated: it would interrupt what the code does about the first one.
			again = time.After(interruptAgain)
		}
		select {
		case <-run.over.done:
			return
		case <-deaf.C:
			go c.drop(used)
			return
		case <-again:
		}
	}
}

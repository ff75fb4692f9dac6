package supervise

// Lifecycle hooks: a program that runs before the entrypoint, and programs that run periodically.
//
// Invariants
//   - A hook is a list of arguments, never text for a shell. It has a time limit; when it exceeds the limit, its
//     process group is killed.
//   - The entrypoint starts only after preStart has succeeded.
//   - A periodic hook never runs twice at a time. A log line about its failure names the hook but not its command.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
)

const (
	preStartLimit   = 3 * time.Hour
	preStartDefault = time.Minute
	periodicLimit   = 5 * time.Minute
	periodicDefault = time.Minute
	periodicHooks   = 64
	hookTextLimit   = 64 << 10
)

// Lifecycle is a validated hook configuration; the zero value has no hooks.
type Lifecycle struct {
	preStart *hook
	periodic []periodicHook
}

type hook struct {
	command []string
	limit   time.Duration
}

type periodicHook struct {
	hook
	name string
	next schedule
}

// schedule returns the first tick after a time.
type schedule func(after time.Time) time.Time

type hookText struct {
	Command        []string `json:"command"`
	TimeoutSeconds *int64   `json:"timeoutSeconds"`
}

type periodicText struct {
	hookText
	Name     string `json:"name"`
	Schedule string `json:"schedule"`
}

// ParseLifecycle parses the JSON of OPENSANDBOX_LIFECYCLE or of an init. An empty text and null mean no hooks.
func ParseLifecycle(text []byte) (Lifecycle, error) {
	var result Lifecycle
	if len(bytes.TrimSpace(text)) == 0 {
		return result, nil
	}
	if len(text) > hookTextLimit {
		return result, errors.New("lifecycle: too long")
	}
	var given struct {
		PreStart *hookText      `json:"preStart"`
		Periodic []periodicText `json:"periodic"`
	}
	if err := json.Unmarshal(text, &given); err != nil {
		return result, errors.New("lifecycle: " + httpx.JSONFault(err))
	}
	if given.PreStart != nil {
		checked, err := given.PreStart.check(preStartDefault, preStartLimit)
		if err != nil {
			return Lifecycle{}, fmt.Errorf("lifecycle: preStart: %w", err)
		}
		result.preStart = &checked
	}
	if len(given.Periodic) > periodicHooks {
		return Lifecycle{}, errors.New("lifecycle: too many periodic hooks")
	}
	names := map[string]bool{}
	for _, entry := range given.Periodic {
		checked, err := entry.check()
		if err != nil {
			return Lifecycle{}, fmt.Errorf("lifecycle: periodic: %w", err)
		}
		if names[checked.name] {
			return Lifecycle{}, errors.New("lifecycle: periodic: a name is not unique")
		}
		names[checked.name] = true
		result.periodic = append(result.periodic, checked)
	}
	return result, nil
}

func (t *hookText) check(usual, most time.Duration) (hook, error) {
	checked := hook{t.Command, usual}
	if len(t.Command) == 0 || t.Command[0] == "" {
		return hook{}, errors.New("command needs a program")
	}
	for _, argument := range t.Command {
		if strings.IndexByte(argument, 0) >= 0 {
			return hook{}, errors.New("command holds a NUL")
		}
	}
	if t.TimeoutSeconds != nil {
		if *t.TimeoutSeconds < 1 || *t.TimeoutSeconds > int64(most/time.Second) {
			return hook{}, fmt.Errorf("timeoutSeconds must be from 1 to %d", int64(most/time.Second))
		}
		checked.limit = time.Duration(*t.TimeoutSeconds) * time.Second
	}
	return checked, nil
}

func (t *periodicText) check() (periodicHook, error) {
	checked, err := t.hookText.check(periodicDefault, periodicLimit)
	if err != nil {
		return periodicHook{}, err
	}
	next, err := parseSchedule(t.Schedule)
	if err != nil {
		return periodicHook{}, err
	}
	if t.Name == "" {
		return periodicHook{}, errors.New("a name is missing")
	}
	return periodicHook{checked, t.Name, next}, nil
}

// Hooks runs the hooks of a Lifecycle.
type Hooks struct {
	reaper *process.Reaper
	env    *environ.Environment
	log    *log.Logger

	mutex   sync.Mutex
	stop    chan struct{} // closed to stop the current periodic hooks
	running atomic.Int64  // number of periodic hooks, including those that were stopped and have not ended
}

// NewHooks makes a Hooks. It starts no hook.
func NewHooks(reaper *process.Reaper, env *environ.Environment, logger *log.Logger) *Hooks {
	return &Hooks{reaper: reaper, env: env, log: logger}
}

// Begin runs preStart to its end, stops the former periodic hooks and starts the new ones. If preStart fails, the
// former periodic hooks continue.
func (h *Hooks) Begin(lifecycle Lifecycle) error {
	if lifecycle.preStart != nil {
		if err := h.run(*lifecycle.preStart, nil); err != nil {
			return fmt.Errorf("preStart: %w", err)
		}
	}
	stop := make(chan struct{})
	h.mutex.Lock()
	if h.stop != nil {
		close(h.stop)
	}
	h.stop = stop
	h.mutex.Unlock()
	for _, each := range lifecycle.periodic {
		h.running.Add(1)
		go func() {
			defer h.running.Add(-1)
			h.repeat(each, stop)
		}()
	}
	return nil
}

// End stops the periodic hooks.
func (h *Hooks) End() {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	if h.stop != nil {
		close(h.stop)
		h.stop = nil
	}
}

// Ended reports whether no periodic hook is left.
func (h *Hooks) Ended() bool { return h.running.Load() == 0 }

func (h *Hooks) repeat(each periodicHook, stop <-chan struct{}) {
	for {
		next := each.next(time.Now())
		if next.IsZero() {
			return
		}
		timer := time.NewTimer(time.Until(next))
		select {
		case <-stop:
			timer.Stop()
			return
		case <-timer.C:
		}
		if err := h.run(each.hook, stop); err != nil {
			h.log.Printf("periodic hook %s: %v", strconv.QuoteToASCII(each.name), err)
		}
	}
}

// run executes one hook; closing stop kills it.
func (h *Hooks) run(each hook, stop <-chan struct{}) error {
	env := h.env.ForCommand(nil)
	path, err := process.LookProgram(each.command[0], env["PATH"])
	if err != nil {
		return errors.New("the program was not found")
	}
	null, err := process.OpenNull()
	if err != nil {
		return err
	}
	child, err := h.reaper.Start(process.Spec{
		Path: path, Argv: each.command, Env: environ.List(env), Files: [3]uintptr{null.Fd(), 1, 2},
	})
	null.Close()
	if err != nil {
		return errors.New("the program cannot be started: " + sys.Reason(err))
	}
	limit := time.NewTimer(each.limit)
	defer limit.Stop()
	select {
	case <-child.Done:
		if status := process.ExitNumber(child.Status); status != 0 {
			return fmt.Errorf("exit status %d", status)
		}
		return nil
	case <-limit.C:
		err = fmt.Errorf("not finished after %s", each.limit)
	case <-stop:
		err = errors.New("stopped")
	}
	child.SignalGroup(syscall.SIGKILL)
	<-child.Done
	return err
}

// parseSchedule parses "@every" with a whole number of seconds, a name such as "@hourly", or five cron fields. Times
// are in UTC.
func parseSchedule(text string) (schedule, error) {
	if interval, ok := strings.CutPrefix(text, "@every "); ok {
		every, err := time.ParseDuration(interval)
		if err != nil || every < time.Second || every%time.Second != 0 {
			return nil, errors.New("schedule: @every needs whole seconds, at least one")
		}
		return func(after time.Time) time.Time { return after.Add(every) }, nil
	}
	switch text {
	case "@hourly":
		text = "0 * * * *"
	case "@daily", "@midnight":
		text = "0 0 * * *"
	case "@weekly":
		text = "0 0 * * 0"
	case "@monthly":
		text = "0 0 1 * *"
	case "@yearly", "@annually":
		text = "0 0 1 1 *"
	}
	fields := strings.Fields(text)
	if len(fields) != len(cronFields) {
		return nil, errors.New("schedule: five fields, @hourly or @every are understood")
	}
	var sets [5]uint64
	for i, field := range fields {
		set, ok := cronSet(field, cronFields[i].low, cronFields[i].high)
		if !ok {
			return nil, errors.New("schedule: field " + strconv.Itoa(i+1) + " is not valid")
		}
		sets[i] = set
	}
	if sets[4]&(1<<7) != 0 { // Sunday is 0 and 7
		sets[4] |= 1
	}
	// As in cron: if both day fields are restricted, a match of one of them is enough.
	either := fields[2][0] != '*' && fields[4][0] != '*'
	return func(after time.Time) time.Time { return cronNext(after.UTC(), sets, either) }, nil
}

var cronFields = [5]struct{ low, high int }{{0, 59}, {0, 23}, {1, 31}, {1, 12}, {0, 7}}

// cronSet parses one field: numbers, ranges, steps, lists. It returns the set of values as bits.
func cronSet(field string, low, high int) (set uint64, ok bool) {
	for part := range strings.SplitSeq(field, ",") {
		span, stepText, stepped := strings.Cut(part, "/")
		step := 1
		if stepped {
			if step, ok = cronNumber(stepText, 1, high); !ok {
				return 0, false
			}
		}
		first, last := low, high
		if span != "*" {
			from, to, ranged := strings.Cut(span, "-")
			if first, ok = cronNumber(from, low, high); !ok {
				return 0, false
			}
			if ranged {
				if last, ok = cronNumber(to, first, high); !ok {
					return 0, false
				}
			} else if !stepped {
				last = first
			}
		}
		for value := first; value <= last; value += step {
			set |= 1 << value
		}
	}
	return set, set != 0
}

func cronNumber(text string, low, high int) (int, bool) {
	value, err := strconv.ParseUint(text, 10, 8)
	return int(value), err == nil && int(value) >= low && int(value) <= high
}

// cronNext returns the first matching minute after a time, or the zero time if there is none within eight years.
func cronNext(after time.Time, sets [5]uint64, either bool) time.Time {
	has := func(field, value int) bool { return sets[field]&(1<<value) != 0 }
	at := after.Truncate(time.Minute).Add(time.Minute)
	for end := at.AddDate(8, 0, 1); at.Before(end); {
		day, weekday := has(2, at.Day()), has(4, int(at.Weekday()))
		fits := day && weekday
		if either {
			fits = day || weekday
		}
		switch {
		case !has(3, int(at.Month())) || !fits:
			at = at.Truncate(24*time.Hour).AddDate(0, 0, 1)
		case !has(1, at.Hour()):
			at = at.Truncate(time.Hour).Add(time.Hour)
		case !has(0, at.Minute()):
			at = at.Add(time.Minute)
		default:
			return at
		}
	}
	return time.Time{}
}

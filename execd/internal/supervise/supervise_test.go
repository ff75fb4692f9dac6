package supervise

import (
	"io"
	"log"
	"os"
	"syscall"
	"testing"
	"time"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

func TestStartedIsReportedOnlyForAProgramThatStarts(t *testing.T) {
	plain := t.TempDir() + "/plain"
	if err := os.WriteFile(plain, []byte("no program"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		entrypoint []string
		path       string
		status     int
		started    int
	}{
		{[]string{"true"}, "/usr/bin:/bin", 0, 1},
		{[]string{"no-such-program"}, "/usr/bin:/bin", 127, 0},
		{[]string{plain}, "/usr/bin:/bin", 126, 0},
		{idleEntrypoint, "/nowhere", 128 + int(syscall.SIGTERM), 1}, // the daemon waits itself, until the signal
	} {
		signals := make(chan os.Signal, 1)
		if c.path == "/nowhere" {
			signals <- syscall.SIGTERM
		}
		env := environ.New([]string{"PATH=" + c.path})
		supervisor := NewSupervisor(testhost.Reaper, env, log.New(io.Discard, "", 0), time.Second, signals, make(chan struct{}), "")
		started := 0
		testkit.Equal(t, c.status, supervisor.Run(c.entrypoint, func() { started++ }))
		testkit.Equal(t, c.started, started)
	}
}

func TestSchedules(t *testing.T) {
	at := time.Date(2026, 2, 27, 23, 59, 30, 0, time.UTC)
	for text, expected := range map[string]string{
		"@every 90s": "2026-02-28T00:01:00Z", "* * * * *": "2026-02-28T00:00:00Z", "@hourly": "2026-02-28T00:00:00Z",
		"*/15 3 * * *": "2026-02-28T03:00:00Z", "5,7-9 * * * *": "2026-02-28T00:05:00Z", "0 0 29 2 *": "2028-02-29T00:00:00Z",
		"0 12 1 * 1": "2026-03-01T12:00:00Z", "0 12 * * 7": "2026-03-01T12:00:00Z", "0 0 31 2 *": "0001-01-01T00:00:00Z",
	} {
		next, err := parseSchedule(text)
		if err != nil {
			t.Fatal(text, err)
		}
		testkit.Equal(t, text+" "+expected, text+" "+next(at).Format(time.RFC3339))
	}
	for _, text := range []string{"", "@every", "@every 1ms", "@every -5s", "* * * *", "60 * * * *", "*/0 * * * *", "5-3 * * * *", "a * * * *", ", * * * *", "+1 * * * *"} {
		if _, err := parseSchedule(text); err == nil {
			t.Fatal("accepted: " + text)
		}
	}
}

func FuzzLifecycle(f *testing.F) {
	f.Add([]byte(`{"preStart":{"command":["a"]},"periodic":[{"name":"n","schedule":"*/5 1-3 * * 1,5","command":["b"]}]}`), "@every 5s")
	f.Fuzz(func(t *testing.T, text []byte, when string) {
		if parsed, err := ParseLifecycle(text); err == nil {
			for _, each := range parsed.periodic {
				if each.limit <= 0 || each.limit > periodicLimit || len(each.command) == 0 {
					t.Fatalf("%+v", each)
				}
			}
		}
		if next, err := parseSchedule(when); err == nil {
			now := time.Date(2026, 3, 1, 4, 5, 6, 0, time.UTC)
			if tick := next(now); !tick.IsZero() && !tick.After(now) {
				t.Fatalf("%q ticks at %s", when, tick)
			}
		}
	})
}

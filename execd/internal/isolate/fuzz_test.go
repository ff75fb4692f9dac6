package isolate

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"sallyport.dev/execd/internal/httpx"
)

func FuzzIsolatedRequest(f *testing.F) {
	f.Add([]byte(`{"workspace":{"path":"/usr"},"overlays":[{"path":"/usr/lib","mode":"ro"}],"binds":[{"source":"/data"}],"uid":5}`))
	f.Add([]byte(`{"overlays":[{"path":"/var/lib/execd/isolation"},{"path":"/../proc"}],"env_passthrough":{"mode":"x"}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var request request
		if json.Unmarshal(text, &request) != nil {
			return
		}
		plan, err := request.plan(DefaultRoot)
		if err != nil {
			return
		}
		for _, mount := range plan.Mounts {
			resolved, err := filepath.EvalSymlinks(mount.Target)
			if err != nil || resolved != mount.Target || within(mount.Target, "/proc") || within(DefaultRoot, mount.Target) {
				t.Fatalf("%+v", mount)
			}
		}
		_, _ = request.environment(map[string]string{"A": "1"})
	})
}

func FuzzRunReport(f *testing.F) {
	f.Add(runReport{reportBegun, httpx.UUID(), 0, time.Unix(1, 2)}.encode())
	f.Add(runReport{reportEnded, httpx.UUID(), 9, time.Unix(-1, 0)}.encode())
	f.Fuzz(func(t *testing.T, text []byte) {
		report, err := parseReport(text)
		if err == nil && !bytes.Equal(text, report.encode()) {
			t.Fatalf("%q has two meanings", text)
		}
	})
}

func FuzzMountInfo(f *testing.F) {
	table, _ := os.ReadFile("/proc/self/mountinfo")
	f.Add(table)
	f.Add([]byte("1 2 0:1 / /a\\040b\\134 rw,nosuid - tmpfs x y\n"))
	f.Fuzz(func(t *testing.T, table []byte) {
		for _, each := range parseMountInfo(table) {
			if each.place[0] != '/' || each.flags&^(1|2|4|8|1024|2048|1<<21) != 0 {
				t.Fatalf("%+v", each)
			}
		}
	})
}

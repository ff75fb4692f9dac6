package server

// GET /metrics and /metrics/watch.
//
// Invariants
//   - A request never waits for a sample: CPU usage is the difference from the previous sample.
//   - Limits of the control group take precedence over those of the host; used ≤ total, 0 ≤ pct ≤ 100.

import (
	"encoding/json"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/sys"
)

const (
	sampleSpacing = 500 * time.Millisecond
	mebi          = 1 << 20
)

// Metrics keeps the previous sample of the CPU usage.
type Metrics struct {
	mutex   sync.Mutex
	at      time.Time
	used    time.Duration
	percent float64
}

type metricsAnswer struct {
	CPUCount  float64 `json:"cpu_count"`
	CPUUsed   float64 `json:"cpu_used_pct"`
	MemTotal  float64 `json:"mem_total_mib"`
	MemUsed   float64 `json:"mem_used_mib"`
	Timestamp int64   `json:"timestamp"`
}

// NewMetrics takes the first sample.
func NewMetrics() *Metrics {
	return &Metrics{at: time.Now(), used: cpuUsed()}
}

func (m *Metrics) read() metricsAnswer {
	now, cpus := time.Now(), cpuCount()
	m.mutex.Lock()
	if elapsed := now.Sub(m.at); elapsed >= sampleSpacing {
		used := cpuUsed()
		m.percent = min(100, max(0, 100*float64(used-m.used)/(float64(elapsed)*cpus)))
		m.at, m.used = now, used
	}
	percent := m.percent
	m.mutex.Unlock()
	total, used := memory()
	return metricsAnswer{
		CPUCount: cpus, CPUUsed: percent,
		MemTotal: float64(total) / mebi, MemUsed: float64(min(used, total)) / mebi,
		Timestamp: now.UnixMilli(),
	}
}

// routes returns the contract's routes that this file serves.
func (m *Metrics) routes() []httpx.Route {
	return []httpx.Route{
		{Method: "GET", Path: "/metrics", Handler: httpx.Always(m.serve)},
		{Method: "GET", Path: "/metrics/watch", Handler: httpx.Always(m.watch)},
	}
}

func (m *Metrics) serve(w http.ResponseWriter, _ *http.Request) {
	httpx.WriteJSON(w, http.StatusOK, m.read())
}

// watch sends one object per second until the client leaves.
func (m *Metrics) watch(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-cache")
	header.Set("X-Accel-Buffering", "no")
	controller := http.NewResponseController(w)
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		line, err := json.Marshal(m.read())
		if err != nil {
			return
		}
		if _, err := w.Write(append(line, '\n', '\n')); err != nil || controller.Flush() != nil {
			return
		}
		select {
		case <-ticker.C:
		case <-r.Context().Done():
			return
		}
	}
}

const cgroupRoot = "/sys/fs/cgroup"

func cpuCount() float64 {
	count := float64(runtime.NumCPU())
	quota, period := cpuQuota()
	if quota <= 0 || period <= 0 {
		return count
	}
	return min(count, float64(quota)/float64(period))
}

// cpuQuota returns the processor time that the control group may use in each period. A value of 0 or less is no limit.
func cpuQuota() (quota, period int64) {
	if fields := strings.Fields(sys.FileText(cgroupRoot + "/cpu.max")); len(fields) == 2 {
		return number(fields[0]), number(fields[1])
	}
	return number(sys.FileText(cgroupRoot + "/cpu/cpu.cfs_quota_us")), number(sys.FileText(cgroupRoot + "/cpu/cpu.cfs_period_us"))
}

// cpuUsed returns the sandbox's processor time, or the host's if no control group reports one.
func cpuUsed() time.Duration {
	for line := range strings.Lines(sys.FileText(cgroupRoot + "/cpu.stat")) {
		if usage, ok := strings.CutPrefix(line, "usage_usec "); ok {
			return time.Duration(number(usage)) * time.Microsecond
		}
	}
	if usage := number(sys.FileText(cgroupRoot + "/cpuacct/cpuacct.usage")); usage >= 0 {
		return time.Duration(usage)
	}
	first, _, _ := strings.Cut(sys.FileText("/proc/stat"), "\n")
	var ticks int64
	for i, field := range strings.Fields(first) {
		if i >= 1 && i <= 8 && i != 4 && i != 5 { // not idle, not iowait
			ticks += max(0, number(field))
		}
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// memory returns the total and the used number of bytes.
func memory() (total, used int64) {
	var available int64
	for line := range strings.Lines(sys.FileText("/proc/meminfo")) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		switch fields[0] {
		case "MemTotal:":
			total = number(fields[1]) << 10
		case "MemAvailable:":
			available = number(fields[1]) << 10
		}
	}
	used = total - available
	type layout struct{ limit, usage, stat, inactive string }
	for _, v := range []layout{
		{"/memory.max", "/memory.current", "/memory.stat", "inactive_file "},
		{"/memory/memory.limit_in_bytes", "/memory/memory.usage_in_bytes", "/memory/memory.stat", "total_inactive_file "},
	} {
		usage := number(sys.FileText(cgroupRoot + v.usage))
		if usage < 0 {
			continue
		}
		if limit := number(sys.FileText(cgroupRoot + v.limit)); limit > 0 && (total == 0 || limit < total) {
			total = limit
		}
		for line := range strings.Lines(sys.FileText(cgroupRoot + v.stat)) {
			if text, ok := strings.CutPrefix(line, v.inactive); ok {
				usage -= max(0, number(text))
			}
		}
		used = max(0, usage)
		break
	}
	return total, max(0, used)
}

// number parses a decimal number. It returns -1 for other text, such as "max" and "".
func number(text string) int64 {
	value, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil {
		return -1
	}
	return value
}

package main

import (
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestTheLogIsOneFileAndItsPredecessorOfBoundedSize(t *testing.T) {
	line := strings.Repeat("x", 1<<20)
	for _, renaming := range []bool{true, false} {
		directory := t.TempDir()
		if !renaming { // as for a file that is a mount
			os.MkdirAll(directory+"/log.1/taken", 0o700)
		}
		logger := newLogger(directory + "/log")
		for range 25 {
			logger.Print(line)
		}
		logger.Print("last")
		entries, _ := os.ReadDir(directory)
		equal(t, 2, len(entries))
		for _, entry := range entries {
			info, _ := entry.Info()
			equal(t, true, info.IsDir() || info.Size() < logFileLimit+2<<20)
		}
		equal(t, true, strings.HasSuffix(mustRead(t, directory+"/log"), " execd: last\n"))
		equal(t, true, !renaming || strings.HasSuffix(mustRead(t, directory+"/log.1"), line+"\n"))
	}
}

func TestWhereNoLogCanBeTheDaemonSaysSoAndWorks(t *testing.T) {
	directory := t.TempDir()
	syscall.Mkfifo(directory+"/fifo", 0o600)
	for _, path := range []string{"/no/such/log", directory, directory + "/fifo", "/dev/full"} {
		process, url, stderr := daemon(t, []string{"EXECD_LOG_FILE=" + path}, hashArguments...)
		eventually(t, "answer", answers(url))
		equal(t, true, strings.Contains(stderr(), "EXECD_LOG_FILE cannot be written: "))
		syscall.Kill(process.Pid, syscall.SIGTERM)
		equal(t, 0, exitOf(t, process))
	}
	_, url, stderr := daemon(t, []string{"EXECD_LOG_FILE=" + directory + "/log", "EXECD_BOOTSTRAP_PRE_SCRIPT=/no/such"}, hashArguments...)
	eventually(t, "answer", answers(url))
	eventually(t, "a line", func() bool {
		data, _ := os.ReadFile(directory + "/log")
		return strings.Contains(string(data), "is not a readable file")
	})
	equal(t, "", stderr())
}

func TestABadTailIsIgnoredAndSoArePositionalArguments(t *testing.T) {
	for _, c := range []struct {
		flag, variable string
		expected       time.Duration
	}{
		{"", "", defaultTail}, {"", "3s", 3 * time.Second}, {"500ms", "3s", 500 * time.Millisecond}, {"0s", "3s", 0}, {"", "9h", tailLimit},
		{"", "soon", defaultTail}, {"5", "3s", defaultTail}, {"", "-1s", defaultTail},
	} {
		var arguments []string
		if c.flag != "" {
			arguments = []string{"--graceful-shutdown-timeout", c.flag}
		}
		var told strings.Builder
		config, _, err := parseConfig(append(arguments, "tail", "--no-such-flag"), func(name string) string {
			return map[string]string{"EXECD_API_GRACE_SHUTDOWN": c.variable}[name]
		}, &told)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, c.expected, config.Tail)
		equal(t, 0, len(config.Entrypoint))
		equal(t, c.expected == defaultTail && c.variable != "", strings.Contains(told.String(), "invalid graceful shutdown timeout"))
	}
	for _, bad := range []string{"--stop-grace=soon", "--stop-grace=-1s", "--port=0", "--max-commands=0"} {
		_, _, err := parseConfig([]string{bad}, os.Getenv, io.Discard)
		equal(t, bad+"true", bad+strconv.FormatBool(err != nil))
	}
	process, url, stderr := daemon(t, []string{"EXECD_API_GRACE_SHUTDOWN=soon"}, append(hashArguments, "tail", "-f", "/dev/null")...)
	eventually(t, "answer", answers(url))
	equal(t, true, strings.Contains(stderr(), "invalid graceful shutdown timeout"))
	syscall.Kill(process.Pid, syscall.SIGTERM)
	equal(t, 0, exitOf(t, process))
}

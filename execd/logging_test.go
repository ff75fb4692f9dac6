package main

import (
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

func TestTheLogIsOneFileAndItsPredecessorOfBoundedSize(t *testing.T) {
	line := strings.Repeat("x", 1<<20)
	for _, renaming := range []bool{true, false} {
		directory := t.TempDir()
		if !renaming { // renaming fails, as it does for a file that is a mount
			os.MkdirAll(directory+"/log.1/taken", 0o700)
		}
		logger := newLogger(directory + "/log")
		for range 25 {
			logger.Print(line)
		}
		logger.Print("last")
		entries, _ := os.ReadDir(directory)
		testkit.Equal(t, 2, len(entries))
		for _, entry := range entries {
			info, _ := entry.Info()
			testkit.Equal(t, true, info.IsDir() || info.Size() < logFileLimit+2<<20)
		}
		testkit.Equal(t, true, strings.HasSuffix(testkit.MustRead(t, directory+"/log"), " execd: last\n"))
		testkit.Equal(t, true, !renaming || strings.HasSuffix(testkit.MustRead(t, directory+"/log.1"), line+"\n"))
	}
}

func TestWhereNoLogCanBeTheDaemonSaysSoAndWorks(t *testing.T) {
	directory := t.TempDir()
	syscall.Mkfifo(directory+"/fifo", 0o600)
	for _, path := range []string{"/no/such/log", directory, directory + "/fifo", "/dev/full"} {
		child, url, stderr := testhost.Daemon(t, []string{"EXECD_LOG_FILE=" + path}, testhost.HashArguments...)
		testkit.Eventually(t, "answer", testhost.Answers(url))
		testkit.Equal(t, true, strings.Contains(stderr(), "EXECD_LOG_FILE cannot be written: "))
		syscall.Kill(child.Pid, syscall.SIGTERM)
		testkit.Equal(t, 0, testhost.ExitOf(t, child))
	}
	_, url, stderr := testhost.Daemon(t, []string{"EXECD_LOG_FILE=" + directory + "/log", "EXECD_BOOTSTRAP_PRE_SCRIPT=/no/such"}, testhost.HashArguments...)
	testkit.Eventually(t, "answer", testhost.Answers(url))
	testkit.Eventually(t, "a line", func() bool {
		data, _ := os.ReadFile(directory + "/log")
		return strings.Contains(string(data), "is not a readable file")
	})
	testkit.Equal(t, "", stderr())
}

func TestABadTailIsIgnoredAndSoArePositionalArguments(t *testing.T) {
	for _, c := range []struct {
		flag, variable string
		expected       time.Duration
	}{
		{"", "", process.DefaultTail}, {"", "3s", 3 * time.Second}, {"500ms", "3s", 500 * time.Millisecond}, {"0s", "3s", 0}, {"", "9h", tailLimit},
		{"", "soon", process.DefaultTail}, {"5", "3s", process.DefaultTail}, {"", "-1s", process.DefaultTail},
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
		testkit.Equal(t, c.expected, config.Tail)
		testkit.Equal(t, 0, len(config.Entrypoint))
		testkit.Equal(t, c.expected == process.DefaultTail && c.variable != "", strings.Contains(told.String(), "invalid graceful shutdown timeout"))
	}
	for _, bad := range []string{"--stop-grace=soon", "--stop-grace=-1s", "--port=0", "--max-commands=0"} {
		_, _, err := parseConfig([]string{bad}, os.Getenv, io.Discard)
		testkit.Equal(t, bad+"true", bad+strconv.FormatBool(err != nil))
	}
	child, url, stderr := testhost.Daemon(t, []string{"EXECD_API_GRACE_SHUTDOWN=soon"}, append(testhost.HashArguments, "tail", "-f", "/dev/null")...)
	testkit.Eventually(t, "answer", testhost.Answers(url))
	testkit.Equal(t, true, strings.Contains(stderr(), "invalid graceful shutdown timeout"))
	syscall.Kill(child.Pid, syscall.SIGTERM)
	testkit.Equal(t, 0, testhost.ExitOf(t, child))
}

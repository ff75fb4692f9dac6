package main

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

// said runs a command in the daemon at url and returns the body of the answer.
func said(t *testing.T, url, command string) string {
	t.Helper()
	request, err := http.NewRequest("POST", url+"/command", strings.NewReader(`{"command":"`+command+`"}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(httpx.TokenHeader, testkit.Token)
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func TestAnEnvFileThatIsNotReadInFullIsALineInTheLog(t *testing.T) {
	const hidden = "hidden-value"
	long := strings.Repeat("#"+strings.Repeat("x", 1022)+"\n", 1024) // 1 MiB
	for name, c := range map[string]struct {
		prepare  func(path string) error
		expected string
		warning  string
	}{
		"missing": {func(string) error { return nil }, "none none", ""},
		"too large": {func(path string) error {
			return os.WriteFile(path, []byte("FIRST="+hidden+"\n"+long+"LAST="+hidden+"\n"), 0o600)
		}, hidden + " none", "larger than 1048576 bytes"},
		"cut in a quoted value": {func(path string) error {
			return os.WriteFile(path, []byte("FIRST="+hidden+"\nLONG='\nLAST=forged\n"+long+"'\n"), 0o600)
		}, hidden + " none", "larger than 1048576 bytes"},
		"cut in a bare value": {func(path string) error {
			head := "FIRST=" + hidden + "\n"
			return os.WriteFile(path, []byte(head+long[:len(long)-len(head)-7]+"\nLAST="+hidden+"\n"), 0o600)
		}, hidden + " none", "larger than 1048576 bytes"},
		"of the largest size": {func(path string) error {
			head := "FIRST=" + hidden + "\n"
			return os.WriteFile(path, []byte(head+long[:len(long)-len(head)-7]+"\nLAST=1"), 0o600)
		}, hidden + " 1", ""},
		"a directory": {func(path string) error { return os.Mkdir(path, 0o755) }, "none none", "not a regular file"},
		"a FIFO":      {func(path string) error { return syscall.Mkfifo(path, 0o644) }, "none none", "not a regular file"},
		"a device":    {func(path string) error { return os.Symlink("/dev/zero", path) }, "none none", "not a regular file"},
		"below a file": {func(path string) error {
			return os.Symlink("/etc/passwd/env", path)
		}, "none none", "cannot be created"},
		"a loop": {func(path string) error { return os.Symlink(path, path) }, "none none", "cannot be read"},
		"malformed": {func(path string) error {
			return os.WriteFile(path, []byte(hidden+"\nFIRST=1\nLAST='"+hidden+"\n"), 0o600)
		}, "1 none", "2 malformed entries"},
		"a value that no program can be given": {func(path string) error {
			return os.WriteFile(path, []byte("FIRST="+hidden+"\nLAST="+strings.Repeat("x", 131072)+"\n"), 0o600)
		}, hidden + " none", "1 malformed entries"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file")
			if err := c.prepare(path); err != nil {
				t.Fatal(err)
			}
			process, url, stderr := testhost.Daemon(t, []string{"EXECD_ENVS=" + path}, testhost.HashArguments...)
			defer process.SignalGroup(syscall.SIGKILL)
			testkit.Eventually(t, "answer", testhost.Answers(url))
			for range 3 {
				body := said(t, url, "echo ${FIRST-none} ${LAST-none}")
				if !strings.Contains(body, `"text":"`+c.expected+`\n"`) {
					t.Error(body)
				}
			}
			log := stderr()
			testkit.Equal(t, false, strings.Contains(log, hidden))
			lines := strings.Count(log, "EXECD_ENVS: ")
			if c.warning == "" {
				testkit.Equal(t, 0, lines)
			} else if lines != 1 || !strings.Contains(log, c.warning) {
				t.Errorf("%d lines: %s", lines, log)
			}
		})
	}
}

package supervise

import (
	"bytes"
	"log"
	"os"
	"path/filepath"
	"testing"
	"time"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

func TestAStartScriptThatDoesNotEndIsKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pre.sh")
	if err := os.WriteFile(path, []byte("export A=1; trap '' TERM; sleep 60; sleep 60"), 0o644); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	env := environ.New([]string{"PATH=" + os.Getenv("PATH"), "EXECD_BOOTSTRAP_PRE_SCRIPT=" + path})
	supervisor := &Supervisor{reaper: testhost.Reaper, env: env, log: log.New(&said, "", 0), program: testhost.Binary(t), scriptLimit: 300 * time.Millisecond}
	begin := time.Now()
	supervisor.sourcePreScript(nil)
	testkit.Equal(t, true, time.Since(begin) < 5*time.Second)
	testkit.Equal(t, "EXECD_BOOTSTRAP_PRE_SCRIPT: did not end within 300ms; its exports are not known\n", said.String())
}

package server

import (
	"os"
	"testing"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/supervise"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

const testPort = 44772

func TestMain(m *testing.M) { os.Exit(testhost.Main(m)) }

type fixture struct {
	*testkit.Client
	server        *Server
	launcher      *process.Launcher
	envFile       string
	isolationRoot string
}

// newFixture makes a fixture without a Jupyter server.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	return fixtureOf(t, "")
}

func fixtureOf(t *testing.T, jupyter string) *fixture {
	t.Helper()
	auth, err := NewAuth(HashToken(testkit.Token), false)
	if err != nil {
		t.Fatal(err)
	}
	binding, err := NewBinding(auth, false, "")
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{isolationRoot: testkit.OutsideTmp(t)}
	f.launcher, f.envFile = testhost.Launcher(t)
	f.server = New(Options{
		Port: testPort, Binding: binding, Hooks: supervise.NewHooks(f.launcher.Reaper, f.launcher.Env, f.launcher.Log), Launcher: f.launcher,
		Umask: 0o022, Program: testhost.Program(t), IsolationRoot: f.isolationRoot, JupyterHost: jupyter, Log: f.launcher.Log,
	})
	f.Client = testkit.NewClient(t, f.server)
	f.Header.Set(httpx.TokenHeader, testkit.Token)
	return f
}

package main

import (
	"os"
	"testing"
)

const testPort = 44772

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

type fixture struct {
	*client
	server        *Server
	launcher      *Launcher
	envFile       string
	isolationRoot string
}

// newFixture has no Jupyter server.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	return fixtureOf(t, "")
}

func fixtureOf(t *testing.T, jupyter string) *fixture {
	t.Helper()
	auth, err := NewAuth(hashToken(testToken), false)
	if err != nil {
		t.Fatal(err)
	}
	binding, err := NewBinding(auth, false, "")
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{isolationRoot: outsideTmp(t)}
	f.launcher, f.envFile = testLauncher(t)
	f.server = New(Options{
		Port: testPort, Binding: binding, Hooks: NewHooks(f.launcher.reaper, f.launcher.env, f.launcher.log), Launcher: f.launcher,
		Umask: 0o022, Program: testProgram(t), IsolationRoot: f.isolationRoot, JupyterHost: jupyter, Log: f.launcher.log,
	})
	f.client = newClient(t, f.server)
	f.header.Set(tokenHeader, testToken)
	return f
}

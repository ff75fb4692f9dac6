// Command execd is the daemon inside a Sallyport sandbox: commands, files,
// metrics and a port proxy over HTTP, and PID 1 duties. It is one static binary
// that needs nothing of the image it runs in and knows only the SHA-256 of its
// access token.
package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

func main() {
	os.Exit(run())
}

func run() int {
	if len(os.Args) == 2 && os.Args[1] == helperFlag {
		return runHelper()
	}
	if len(os.Args) == 2 && os.Args[1] == isolateFlag {
		return runIsolated()
	}
	if len(os.Args) == 2 && os.Args[1] == isolatedFlag {
		return serveIsolated()
	}
	config, clear, err := parseConfig(os.Args[1:], os.Getenv, os.Stderr)
	if errors.Is(err, errUsage) {
		return 2
	}
	var auth Auth
	if err == nil && (config.TokenHash != "" || !config.RuntimeInit) { // else an init brings the hash
		auth, err = NewAuth(config.TokenHash, config.Insecure)
	}
	var binding *Binding
	if err == nil {
		binding, err = NewBinding(auth, config.RuntimeInit, config.LaunchFile)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "execd:", err)
		return 2
	}
	if clear {
		if err := forgetClearToken(config); err != nil {
			fmt.Fprintln(os.Stderr, "execd: the clear token stays readable in /proc:", err)
		}
	}
	_ = prctl(prSetDumpable, 0)
	closeInheritedOnExec()
	signals := make(chan os.Signal, 16)
	// Also undoes an inherited "ignore", which children would inherit in turn.
	signal.Notify(signals, forwardedSignals...)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU)
	// Not ignored (children would inherit that): a write to a closed log fails only.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)

	logger := newLogger(os.Getenv("EXECD_LOG_FILE"))
	lifecycle, err := parseLifecycle([]byte(os.Getenv("OPENSANDBOX_LIFECYCLE")))
	if err != nil {
		fmt.Fprintln(os.Stderr, "execd:", err)
		return 2
	}
	env := NewEnvironment(os.Environ())
	for _, name := range credentials {
		os.Unsetenv(name)
	}
	env.warnSkip = func(skipped int) { logger.Printf("EXECD_ENVS: %d malformed entries skipped", skipped) }
	directory, err := os.Getwd()
	if err != nil {
		directory = "/"
	}
	if config.Init && os.Getpid() != 1 {
		if err := prctl(prSetChildSubreaper, 1); err != nil {
			logger.Printf("orphans cannot be adopted: %v", err)
		}
	}
	reaper := NewReaper()
	accounts := func() Accounts { return LoadAccounts("") }
	commands := &Commands{
		reaper: reaper, records: NewRecords(config.MaxRunning), env: env, accounts: accounts,
		directory: directory, tail: config.Tail, log: logger,
	}
	jupyter, err := NewJupyter(config.JupyterHost, config.JupyterToken)
	if err != nil {
		logger.Print(err)
	}
	server := &Server{
		binding:   binding,
		hooks:     &Hooks{reaper: reaper, env: env, log: logger},
		port:      config.Port,
		commands:  commands,
		sessions:  NewSessions(commands),
		terminals: NewTerminals(commands),
		code:      NewCodeContexts(jupyter, commands),
		files: &Files{
			env: env, accounts: accounts, directory: directory, umask: currentUmask(),
			walks: make(chan struct{}, concurrentWalks),
		},
		metrics:     NewMetrics(),
		proxy:       newProxy(func(line string) { logger.Print(line) }),
		connections: NewConnections(),
		log:         logger,
	}
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	server.identities = NewIdentities(reaper, accounts, logger, self)
	server.isolation = NewIsolation(commands, self, defaultUpperRoot, config.Init)
	supervisor := &Supervisor{
		reaper: reaper, env: env, log: logger, grace: config.Grace, signals: signals, again: make(chan struct{}, 1),
	}
	if config.Init {
		server.restart = supervisor.restart
	}
	listener, err := listen(":" + strconv.Itoa(config.Port))
	if err != nil {
		logger.Printf("cannot listen: %v", err)
		return 1
	}
	go reserveThreads() // while the listener already answers
	failed := make(chan struct{})
	go func() {
		logger.Printf("serving ended: %v", server.Serve(listener))
		close(failed)
	}()
	prepareEnvFile(env.envFile)
	if config.Init {
		prepared := make(chan error, 1)
		go func() { prepared <- supervisor.prepare(server.hooks, lifecycle) }()
		if status, err := supervisor.await(prepared); err != nil {
			logger.Printf("the entrypoint does not start: %v", err)
			supervisor.endEverything()
			return status
		}
		server.binding.setReady(true)
		return supervisor.Run(config.Entrypoint)
	}
	go func() {
		if err := supervisor.prepare(server.hooks, lifecycle); err != nil {
			logger.Print(err)
			return
		}
		server.binding.setReady(true)
	}()
	for {
		select {
		case <-failed:
			return 1
		case sig := <-signals:
			if sig == syscall.SIGTERM || sig == syscall.SIGINT || sig == syscall.SIGQUIT {
				listener.Close()
				supervisor.endEverything()
				return 0
			}
		}
	}
}

// listen waits a little for a port that an outgoing connection of the image
// happens to use: ours lies in the kernel's ephemeral range.
func listen(address string) (net.Listener, error) {
	for deadline := time.Now().Add(3 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		listener, err := net.Listen("tcp4", address)
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			return listener, err
		}
	}
}

// prepareEnvFile creates the EXECD_ENVS file if that is possible.
func prepareEnvFile(path string) {
	if os.MkdirAll(filepath.Dir(path), 0o755) != nil {
		return
	}
	if file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NONBLOCK, 0o644); err == nil {
		file.Close()
	}
}

// Command execd is the daemon inside a Sallyport sandbox. It serves commands, files, metrics and a port proxy over
// HTTP, and it does the work of PID 1. It is one static binary that needs nothing of the image in which it runs. It
// knows its access token only as a SHA-256.
package main

import (
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"

	"sallyport.dev/execd/internal/account"
	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/files"
	"sallyport.dev/execd/internal/isolate"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/server"
	"sallyport.dev/execd/internal/supervise"
	"sallyport.dev/execd/internal/sys"
)

// Exit statuses of a daemon that ends before it serves.
const (
	exitUnlistened = 1
	exitUsage      = 2
)

func main() {
	if other := otherProgram(os.Args); other != nil {
		os.Exit(other())
	}
	os.Exit(run())
}

// otherProgram returns the function to run if this file was started for another purpose. It returns nil for the daemon
// itself.
func otherProgram(arguments []string) func() int {
	if len(arguments) != 2 {
		return nil
	}
	switch arguments[1] {
	case files.HelperFlag:
		return files.RunHelper
	case isolate.Flag:
		return func() int { return isolate.Run(server.IsolatedParts) }
	case supervise.EnvironmentFlag:
		return supervise.WriteEnvironment
	}
	return nil
}

// run is the daemon. It returns the exit status.
func run() int {
	config, binding, err := configure()
	if errors.Is(err, errUsage) {
		return exitUsage
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "execd:", err)
		return exitUsage
	}
	_ = sys.Prctl(sys.PrSetDumpable, 0)
	sys.CloseInheritedOnExec()
	signals := takeSignals()
	logger := newLogger(os.Getenv("EXECD_LOG_FILE"))
	lifecycle, err := supervise.ParseLifecycle([]byte(os.Getenv("OPENSANDBOX_LIFECYCLE")))
	if err != nil {
		fmt.Fprintln(os.Stderr, "execd:", err)
		return exitUsage
	}
	env := takeEnvironment(logger)
	d := assemble(config, binding, env, logger, signals)
	if err := d.api.Open(); err != nil {
		logger.Printf("cannot listen: %v", err)
		return exitUnlistened
	}
	go process.ReserveThreads() // while the listener already answers
	go d.serve()
	env.PrepareFile()
	if config.Init {
		if !config.AwaitInit {
			d.begin <- server.Beginning{Lifecycle: lifecycle, Entrypoint: config.Entrypoint}
		}
		return d.runEntrypoint()
	}
	return d.runAlone(lifecycle)
}

// configure reads the command line and the environment. If the token was given in clear, it removes the token by
// executing this program again.
func configure() (Config, *server.Binding, error) {
	config, inClear, err := parseConfig(os.Args[1:], os.Getenv, os.Stderr)
	if err != nil {
		return config, nil, err
	}
	var auth server.Auth
	if config.TokenHash != "" || !config.RuntimeInit { // otherwise the token's hash comes with an init
		if auth, err = server.NewAuth(config.TokenHash, config.Insecure); err != nil {
			return config, nil, err
		}
	}
	binding, err := server.NewBinding(auth, config.RuntimeInit || config.AwaitInit, config.LaunchFile)
	if err != nil {
		return config, nil, err
	}
	if inClear {
		if err := forgetClearToken(config); err != nil {
			fmt.Fprintln(os.Stderr, "execd: the clear token stays readable in /proc:", err)
		}
	}
	return config, binding, nil
}

// takeSignals returns a channel with the signals for the entrypoint. It also handles signals that this process
// inherited as ignored, because children would inherit that too.
func takeSignals() <-chan os.Signal {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, supervise.ForwardedSignals...)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU)
	// SIGPIPE is handled, not ignored, because children would inherit that it is ignored. A write to a closed log then
	// only returns an error.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	return signals
}

// takeEnvironment returns the environment for children, and removes credentials from this process's own environment.
func takeEnvironment(logger *log.Logger) *environ.Environment {
	env := environ.New(os.Environ())
	for _, name := range environ.Credentials {
		os.Unsetenv(name)
	}
	env.Warn = func(problem string) { logger.Print("EXECD_ENVS: " + problem) }
	return env
}

// service holds the parts of a running daemon.
type service struct {
	binding    *server.Binding
	hooks      *supervise.Hooks
	api        *server.API
	supervisor *supervise.Supervisor
	signals    <-chan os.Signal
	begin      chan server.Beginning // receives once what to start
	lost       chan struct{}         // closed when the API is lost permanently
	log        *log.Logger
}

// assemble makes the parts of the daemon. It starts only the reaper.
func assemble(config Config, binding *server.Binding, env *environ.Environment, logger *log.Logger, signals <-chan os.Signal) *service {
	if config.Init && os.Getpid() != 1 {
		if err := sys.Prctl(sys.PrSetChildSubreaper, 1); err != nil {
			logger.Printf("orphans cannot be adopted: %v", err)
		}
	}
	launcher := &process.Launcher{
		Reaper: process.NewReaper(), Env: env, Accounts: func() account.Accounts { return account.Load("") }, Directory: workingDirectory(),
		Tail: config.Tail, Slots: process.NewSlots(config.MaxRunning), Leftovers: process.NewLeftovers(), Log: logger,
	}
	lost := make(chan struct{})
	supervisor := supervise.NewSupervisor(launcher.Reaper, env, logger, config.Grace, signals, lost, programPath())
	program, err := process.ThisProgram() // before any program of the image runs
	if err != nil {
		logger.Printf("no helpers: %v", err)
	}
	options := server.Options{
		Port: config.Port, Binding: binding, Hooks: supervise.NewHooks(launcher.Reaper, env, logger), Launcher: launcher, Umask: sys.CurrentUmask(),
		Program: program, IsolationRoot: isolate.DefaultRoot, Init: config.Init,
		JupyterHost: config.JupyterHost, JupyterToken: config.JupyterToken, Log: logger,
	}
	begin := make(chan server.Beginning, 1)
	if config.Init {
		options.Restart = supervisor.Restart
	}
	if config.AwaitInit {
		options.Begin, options.Entrypoint = func(first server.Beginning) { begin <- first }, config.Entrypoint
	}
	return &service{
		binding: binding, hooks: options.Hooks, api: server.NewAPI(server.New(options), config.Port, logger), supervisor: supervisor,
		signals: signals, begin: begin, lost: lost, log: logger,
	}
}

func workingDirectory() string {
	directory, err := os.Getwd()
	if err != nil {
		return "/"
	}
	return directory
}

// serve serves the API. It closes lost if the API ends permanently.
func (d *service) serve() {
	if err := d.api.Serve(); err != nil {
		d.log.Printf("the API is gone for good: %v", err)
		close(d.lost)
	}
}

// runEntrypoint runs the entrypoint, for --init, as soon as it is known. It returns the exit status.
func (d *service) runEntrypoint() int {
	var first server.Beginning
	prepared := make(chan error, 1)
	go func() {
		first = <-d.begin
		prepared <- d.supervisor.Prepare(d.hooks, first.Lifecycle, first.Entrypoint)
	}()
	if status, err := d.supervisor.Await(prepared); err != nil {
		d.log.Printf("the entrypoint does not start: %v", err)
		d.supervisor.EndEverything()
		return status
	}
	return d.supervisor.Run(first.Entrypoint, func() { d.binding.SetReady(true) })
}

// runAlone waits for the end of the daemon without --init. It returns the exit status.
func (d *service) runAlone(lifecycle supervise.Lifecycle) int {
	go func() {
		if err := d.supervisor.Prepare(d.hooks, lifecycle, nil); err != nil {
			d.log.Print(err)
			return
		}
		d.binding.SetReady(true)
	}()
	for {
		select {
		case <-d.lost:
			d.supervisor.EndEverything()
			return supervise.ExitUnserved
		case sig := <-d.signals:
			if supervise.Ends(sig) {
				d.api.Close()
				d.supervisor.EndEverything()
				return 0
			}
		}
	}
}

// programPath returns the path at which a shell without the daemon's privileges can start this program.
func programPath() string {
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return path
}

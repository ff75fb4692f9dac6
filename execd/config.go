package main

// Flags and environment variables of the daemon.
//
// Invariants
//   - A flag takes precedence over its environment variable. An unknown flag ends the daemon with a message.
//   - If the token is given in clear, the daemon executes its own program again with the hash instead. So the token is
//     in neither /proc/PID/cmdline nor /proc/PID/environ.

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/server"
)

// Config is the validated start configuration.
type Config struct {
	Port         int
	TokenHash    string
	Insecure     bool
	Tail         time.Duration
	MaxRunning   int
	Grace        time.Duration
	Init         bool
	Entrypoint   []string
	JupyterHost  string
	JupyterToken string
	RuntimeInit  bool
	AwaitInit    bool
	LaunchFile   string
}

const (
	defaultGrace = 10 * time.Second
	tailLimit    = time.Minute
)

// errUsage is the error for an invalid command line that was already reported.
var errUsage = errors.New("usage")

// parseConfig reads the arguments (without the program's name) and the environment. inClear is true if the arguments or
// the environment contain the token in clear.
func parseConfig(arguments []string, getenv func(string) string, stderr io.Writer) (config Config, inClear bool, err error) {
	flags := flag.NewFlagSet("execd", flag.ContinueOnError)
	flags.SetOutput(stderr)
	port := flags.Int("port", defaultPort, "TCP port")
	hash := flags.String("access-token-sha256", "", "SHA-256 of the access token, 64 hexadecimal digits")
	token := flags.String("access-token", "", "access token in clear (EXECD_ACCESS_TOKEN); prefer --access-token-sha256")
	insecure := flags.Bool("insecure-no-token", false, "serve without a token")
	tail := flags.String("graceful-shutdown-timeout", "", "longest wait for open outputs after a command has ended (EXECD_API_GRACE_SHUTDOWN)")
	maxRunning := flags.Int("max-commands", defaultMaxRunning, "commands running at a time")
	grace := flags.Duration("stop-grace", defaultGrace, "time between SIGTERM and SIGKILL when stopping")
	initMode := flags.Bool("init", false, "be PID 1: reap, forward signals, run the entrypoint after --")
	jupyterHost := flags.String("jupyter-host", getenv("JUPYTER_HOST"), "address of the Jupyter server (JUPYTER_HOST)")
	jupyterToken := flags.String("jupyter-token", getenv("JUPYTER_TOKEN"), "its token (JUPYTER_TOKEN)")
	runtimeInit := flags.Bool("runtime-init", truthy(getenv("EXECD_RUNTIME_INIT")), "serve no request before POST /internal/init (EXECD_RUNTIME_INIT)")
	awaitInit := flags.Bool("await-init", false, "with --init: start no program before POST /internal/init, which can name the entrypoint")
	launchFile := flags.String("launch-file", "", "file whose content changes with a restore; after a restore, serve no request before POST /internal/init")
	for _, name := range []string{"jupyter-idle-poll-interval", "log-level", "isolation-config"} {
		flags.String(name, "", "accepted for compatibility, without effect")
	}
	if err := flags.Parse(arguments); err != nil {
		return Config{}, false, errUsage
	}
	config = Config{
		Port: *port, TokenHash: strings.ToLower(*hash), Insecure: *insecure, Tail: process.DefaultTail,
		MaxRunning: *maxRunning, Grace: *grace, Init: *initMode, JupyterHost: *jupyterHost, JupyterToken: *jupyterToken,
		RuntimeInit: *runtimeInit, AwaitInit: *awaitInit, LaunchFile: *launchFile,
	}
	if config.Init {
		config.Entrypoint = flags.Args()
	}
	if config.AwaitInit && !config.Init {
		return config, false, errors.New("--await-init needs --init")
	}
	if *port < 1 || *port > 65535 {
		return config, false, errors.New("--port must be between 1 and 65535")
	}
	if *maxRunning < 1 {
		return config, false, errors.New("--max-commands must be 1 or more")
	}
	if *grace < 0 {
		return config, false, errors.New("--stop-grace must not be negative")
	}
	inherited := getenv("EXECD_ACCESS_TOKEN")
	inClear = *token != "" || inherited != ""
	if config.TokenHash == "" && inClear {
		if *token == "" {
			*token = inherited
		}
		config.TokenHash = server.HashToken(*token)
	}
	window := *tail
	if window == "" {
		window = getenv("EXECD_API_GRACE_SHUTDOWN")
	}
	if window != "" {
		if value, err := time.ParseDuration(window); err == nil && value >= 0 {
			config.Tail = min(value, tailLimit)
			if value > tailLimit {
				fmt.Fprintln(stderr, "execd: the graceful shutdown timeout is", tailLimit, "at most")
			}
		} else {
			fmt.Fprintln(stderr, "execd: ignoring an invalid graceful shutdown timeout")
		}
	}
	return config, inClear, nil
}

func truthy(text string) bool {
	switch strings.ToLower(text) {
	case "1", "true", "yes", "on":
		return true
	}
	return false
}

// arguments returns the configuration as flags, with the hash of the token only.
func (c Config) arguments() []string {
	list := []string{
		"--port", strconv.Itoa(c.Port), "--access-token-sha256", c.TokenHash,
		"--graceful-shutdown-timeout", c.Tail.String(), "--max-commands", strconv.Itoa(c.MaxRunning), "--stop-grace", c.Grace.String(),
	}
	if c.RuntimeInit {
		list = append(list, "--runtime-init")
	}
	if c.AwaitInit {
		list = append(list, "--await-init")
	}
	if c.LaunchFile != "" {
		list = append(list, "--launch-file", c.LaunchFile)
	}
	if c.Init {
		list = append(append(list, "--init", "--"), c.Entrypoint...)
	}
	return list
}

// forgetClearToken executes this program again without the token in clear. It returns only if that fails.
func forgetClearToken(config Config) error {
	replaced := []string{"EXECD_ACCESS_TOKEN", "JUPYTER_HOST", "JUPYTER_TOKEN"}
	environ := make([]string, 0, len(os.Environ())+len(replaced))
	for _, entry := range os.Environ() {
		if name, _, _ := strings.Cut(entry, "="); !slices.Contains(replaced, name) {
			environ = append(environ, entry)
		}
	}
	for name, value := range map[string]string{"JUPYTER_HOST": config.JupyterHost, "JUPYTER_TOKEN": config.JupyterToken} {
		if value != "" {
			environ = append(environ, name+"="+value)
		}
	}
	// Do not use the path of the file, because another file can have it by now.
	return syscall.Exec("/proc/self/exe", append([]string{os.Args[0]}, config.arguments()...), environ)
}

const (
	defaultPort       = 44772
	defaultMaxRunning = 512
)

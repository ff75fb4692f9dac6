package process

// The meaning of the end of a process.

import (
	"strconv"
	"syscall"
)

// OutcomeOf translates a status for a client.
func OutcomeOf(status syscall.WaitStatus) Outcome {
	result := Outcome{ExitCode: status.ExitStatus()}
	switch {
	case status.Signaled():
		result.ExitCode = -1
		result.Failure = "signal: " + status.Signal().String()
	case result.ExitCode != 0:
		result.Failure = "exit status " + strconv.Itoa(result.ExitCode)
	}
	return result
}

// Outcome is the final state of a record.
type Outcome struct {
	ExitCode int
	Failure  string
	TimedOut bool
}

package process

// What the end of a process means.

import (
	"strconv"
	"syscall"
)

// OutcomeOf says what a status means for a client.
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

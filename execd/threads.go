package main

// Threads in reserve.
//
// A workload may use up the sandbox's limit of processes, threads included. The Go
// runtime ends a program that needs a thread and cannot have one, and as PID 1 its
// end is the sandbox's; it keeps every thread it ever had. So the ones that requests
// need while others block are made at the start.

import (
	"runtime"
	"sync"
)

const spareThreads = 24

// reserveThreads makes the runtime own that many threads.
func reserveThreads() {
	var all, held sync.WaitGroup
	held.Add(spareThreads)
	release := make(chan struct{})
	for range spareThreads {
		all.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			held.Done()
			<-release
		})
	}
	held.Wait()
	close(release)
	all.Wait()
}

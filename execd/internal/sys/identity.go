package sys

// The identity of this process.

import (
	"os"
	"syscall"
)

// TakeIdentity sets the user, group and supplementary groups of every thread of this process.
func TakeIdentity(uid, gid uint32, groups []uint32) error {
	list := make([]int, len(groups))
	for i, group := range groups {
		list[i] = int(group)
	}
	if err := syscall.Setgroups(list); err != nil {
		return os.NewSyscallError("setgroups", err)
	}
	if err := syscall.Setresgid(int(gid), int(gid), int(gid)); err != nil {
		return os.NewSyscallError("setresgid", err)
	}
	return os.NewSyscallError("setresuid", syscall.Setresuid(int(uid), int(uid), int(uid)))
}

package files

// The metadata of a file: owner, mode, times and extended attributes.

import (
	"encoding/binary"
	"os"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"sallyport.dev/execd/internal/sys"
)

const (
	accessWrite    = 2
	accessSearch   = 1
	atLinkItself   = 0x100    // AT_SYMLINK_NOFOLLOW
	attributeBytes = 64 << 10 // bytes of a value or of all names: the kernel's limit

	attributeACL        = "system.posix_acl_access"
	attributeDefaultACL = "system.posix_acl_default"
	attributeCapability = "security.capability"
)

// keepOwner gives a new file the owner and group of another file, and returns the mode for it. Without the privilege to
// change the owner, the file belongs to the daemon's user and keeps the group if possible. It then loses the set-id
// bits, because they were set for a file of another owner.
func keepOwner(file *os.File, like *syscall.Stat_t) (mode uint32) {
	mode = like.Mode & 0o7777
	var own syscall.Stat_t
	if err := syscall.Fstat(int(file.Fd()), &own); err == nil && own.Uid == like.Uid && own.Gid == like.Gid {
		return mode
	}
	if file.Chown(int(like.Uid), int(like.Gid)) == nil {
		return mode
	}
	_ = file.Chown(-1, int(like.Gid))
	return mode &^ (syscall.S_ISUID | syscall.S_ISGID)
}

// attribute is an extended attribute.
type attribute struct {
	name  string
	value []byte
}

// attributesOf reads the extended attributes that a copy keeps: the user's attributes, ACLs and capabilities. The
// kernel or the file system sets the others.
func attributesOf(path string) []attribute {
	if n, err := syscall.Listxattr(path, nil); err != nil || n == 0 {
		return nil
	}
	names, value := make([]byte, attributeBytes), make([]byte, attributeBytes)
	n, err := syscall.Listxattr(path, names)
	if err != nil {
		return nil
	}
	var list []attribute
	for name := range strings.SplitSeq(string(names[:n]), "\x00") {
		switch {
		case strings.HasPrefix(name, "user."), name == attributeACL, name == attributeDefaultACL, name == attributeCapability:
		default:
			continue
		}
		size, err := syscall.Getxattr(path, name, value)
		if err != nil {
			continue
		}
		list = append(list, attribute{name, slices.Clone(value[:size])})
	}
	return list
}

// keepAttributes sets the attributes that the file system supports, and returns the mode for the file. In a file with
// an ACL the group bits of the mode are the ACL's mask. If the ACL cannot be set, the mode is therefore restricted to
// the permissions that the ACL gave to the owning group.
func keepAttributes(file *os.File, list []attribute, mode uint32) uint32 {
	for _, a := range list {
		if err := setAttribute(file, a); err != nil && a.name == attributeACL {
			mode &= ^uint32(0o070) | groupOfACL(a.value)<<3
		}
	}
	return mode
}

// groupOfACL returns the permissions of the owning group in an ACL. The value has a header of 4 bytes, then entries of
// tag (2 bytes), permissions (2) and id (4), little endian.
func groupOfACL(value []byte) uint32 {
	const owningGroup = 4
	for entry := 4; entry+8 <= len(value); entry += 8 {
		if binary.LittleEndian.Uint16(value[entry:]) == owningGroup {
			return uint32(binary.LittleEndian.Uint16(value[entry+2:])) & 7
		}
	}
	return 0
}

func setAttribute(file *os.File, a attribute) error {
	name, err := syscall.BytePtrFromString(a.name)
	if err != nil {
		return err
	}
	var value unsafe.Pointer
	if len(a.value) > 0 {
		value = unsafe.Pointer(&a.value[0])
	}
	_, _, errno := syscall.Syscall6(syscall.SYS_FSETXATTR, file.Fd(), uintptr(unsafe.Pointer(name)), uintptr(value), uintptr(len(a.value)), 0, 0)
	return sys.ErrnoOrNil(errno)
}

// setTimes sets the times of an open file.
func setTimes(file *os.File, accessed, modified syscall.Timespec) error {
	times := [2]syscall.Timespec{accessed, modified}
	_, _, errno := syscall.Syscall6(syscall.SYS_UTIMENSAT, file.Fd(), 0, uintptr(unsafe.Pointer(&times)), 0, 0, 0)
	return sys.ErrnoOrNil(errno)
}

// setLinkTimes sets the times of a link itself.
func setLinkTimes(path string, accessed, modified syscall.Timespec) error {
	name, err := syscall.BytePtrFromString(path)
	if err != nil {
		return err
	}
	times, here := [2]syscall.Timespec{accessed, modified}, sys.AtFdcwd
	_, _, errno := syscall.Syscall6(syscall.SYS_UTIMENSAT, uintptr(here), uintptr(unsafe.Pointer(name)),
		uintptr(unsafe.Pointer(&times)), atLinkItself, 0, 0)
	return sys.ErrnoOrNil(errno)
}

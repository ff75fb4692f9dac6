package isolate

// The view of an isolated session: what its processes see of the file system.
//
// A helper begins here, as this program again in namespaces of its own, still with
// CAP_SYS_ADMIN. It makes the view, enters it, gives the capability away in every thread and
// then is the session's server (serve.go).
//
// Invariants
//   - Everything is read-only but what the plan names, /tmp and /dev, which are the session's
//     own, terminals included. What sessions have written is not visible, nor is the old
//     root reachable.
//   - What is mounted, and where, is found without following a link and then held open:
//     others may exchange what they can write to at any moment.
//   - The capability alone keeps others from tracing the helper, and it lets none do so from its
//     first instructions on. So it executes no program afterwards: that would permit tracing again.
//   - Any step that fails ends the helper with a message; there is no session then.
//   - Nothing the session's processes do can undo the view: they lack the capability,
//     and no_new_privs keeps it away.

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"sallyport.dev/execd/internal/helper"
	"sallyport.dev/execd/internal/sys"
)

// Flag is the whole command line of the helper of an isolated session: make the view and serve in it.
const Flag = "--isolate" // make the view and serve in it

// Run is an isolated session: it returns when the session ends.
func Run(parts Parts) int {
	var plan viewPlan
	control, err := helper.Begin(&plan)
	if control == nil {
		return 2
	}
	if err == nil {
		err = plan.enter()
	}
	if err != nil {
		helper.Answer(control, err)
		return 1
	}
	return serve(&plan, control, parts)
}

// enter makes the view, enters it and keeps no more privileges than its processes may have.
func (p *viewPlan) enter() error {
	if err := p.build(); err != nil {
		return err
	}
	if err := sys.NoNewPrivileges(); err != nil {
		return err
	}
	// Do this before setting the identity, which takes the permission for it away.
	if err := sys.DropMountingEverywhere(); err != nil {
		return err
	}
	if !p.Switch {
		return nil
	}
	return sys.TakeIdentity(p.UID, p.GID, p.Groups)
}

func mount(source, target, kind string, flags uintptr, options string) error {
	return sys.PathError("mount", target, syscall.Mount(source, target, kind, flags, options))
}

// make builds the view below the scratch directory and enters it.
func (p *viewPlan) build() error {
	if err := mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""); err != nil {
		return err
	}
	root := filepath.Join(p.Scratch, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	if err := mount("/", root, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
		return err
	}
	if err := makeReadOnly(root); err != nil {
		return err
	}
	err := p.privateDevices(root)
	if err != nil {
		return err
	}
	if p.PrivateTmp {
		err = p.privateTmp(root)
	} else if _, missing := os.Stat("/tmp"); missing == nil {
		err = mount("/tmp", root+"/tmp", "", syscall.MS_BIND|syscall.MS_REC, "")
	}
	if err != nil {
		return err
	}
	for i, each := range p.Mounts {
		if err := p.mount(root, filepath.Join(p.Scratch, strconv.Itoa(i)), each); err != nil {
			return err
		}
	}
	if err := mount("proc", root+"/proc", "proc", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, ""); err != nil {
		return err
	}
	// Hides what sessions have written from each other.
	if err := mount("tmpfs", root+p.Root, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_RDONLY, "mode=555"); err != nil {
		return err
	}
	if err := syscall.Chdir(root); err != nil {
		return os.NewSyscallError("chdir", err)
	}
	if err := syscall.PivotRoot(".", "."); err != nil {
		return os.NewSyscallError("pivot_root", err)
	}
	if err := syscall.Unmount(".", syscall.MNT_DETACH); err != nil {
		return os.NewSyscallError("umount", err)
	}
	return os.NewSyscallError("chdir", syscall.Chdir("/"))
}

func (p *viewPlan) privateTmp(root string) error {
	if _, err := os.Stat("/tmp"); errors.Is(err, os.ErrNotExist) {
		return nil // an image without one
	}
	return mount("tmpfs", root+"/tmp", "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "mode=1777")
}

// privateDevices gives the view devices, terminals and shared memory of its own. A read-only
// mount would not do: gVisor lets the mode of what is there be changed all the same.
func (p *viewPlan) privateDevices(root string) error {
	scratch := filepath.Join(p.Scratch, "dev")
	if err := os.Mkdir(scratch, 0o700); err != nil {
		return err
	}
	if err := mount("tmpfs", scratch, "tmpfs", syscall.MS_NOSUID, "mode=700"); err != nil {
		return err
	}
	if err := layer("/dev", root+"/dev", scratch, syscall.MS_NOSUID|syscall.MS_NOEXEC); err != nil {
		return err
	}
	for _, own := range []struct{ place, kind, options string }{
		{"/dev/pts", "devpts", "newinstance,mode=755,ptmxmode=666"}, {"/dev/shm", "tmpfs", "mode=1777,size=64m"},
	} {
		if _, err := os.Stat(root + own.place); errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err := mount(own.kind, root+own.place, own.kind, syscall.MS_NOSUID|syscall.MS_NOEXEC, own.options); err != nil {
			return err
		}
	}
	return nil
}

// mount puts one mount into the view; scratch is a directory for it alone.
func (p *viewPlan) mount(root, scratch string, each viewMount) error {
	held, err := openPlain(each.Source)
	if err != nil {
		return err
	}
	defer held.Close()
	source := heldPath(held)
	if p.PrivateTmp && within(each.Target, "/tmp") {
		if err := mountPoint(source, root+each.Target); err != nil {
			return err
		}
	}
	place, err := openPlain(root + each.Target)
	if err != nil {
		return err
	}
	defer place.Close()
	target := heldPath(place)
	switch each.Kind {
	case viewWritable, viewReadOnly:
		if err := mount(source, target, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return err
		}
		if each.Kind == viewReadOnly {
			return makeReadOnly(root + each.Target)
		}
		return nil
	}
	if err := os.Mkdir(scratch, 0o700); err != nil {
		return err
	}
	if each.Kind == viewOverlay {
		// gVisor takes no layer on its own root file system; then it is kept in memory, too.
		if err := layer(source, target, scratch, syscall.MS_NOSUID|syscall.MS_NODEV); !errors.Is(err, syscall.EINVAL) {
			return err
		}
	}
	if err := mount("tmpfs", scratch, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "mode=700"); err != nil {
		return err
	}
	return layer(source, target, scratch, syscall.MS_NOSUID|syscall.MS_NODEV)
}

// openPlain holds what a clean, absolute path names now; a link in it is a failure.
func openPlain(path string) (*os.File, error) {
	fd, err := syscall.Open("/", sys.OpenPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	for name := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if err != nil {
			break
		}
		if name == "" {
			continue // the root itself
		}
		above := fd
		fd, err = syscall.Openat(above, name, sys.OpenPath|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
		syscall.Close(above)
	}
	if err != nil {
		return nil, sys.PathError("open", path, err)
	}
	held := os.NewFile(uintptr(fd), path)
	var stat syscall.Stat_t
	if err = syscall.Fstat(fd, &stat); err == nil && stat.Mode&syscall.S_IFMT == syscall.S_IFLNK {
		err = syscall.ELOOP
	}
	if err != nil {
		held.Close()
		return nil, sys.PathError("open", path, err)
	}
	return held, nil
}

// heldPath names what is held, wherever it is by now.
func heldPath(held *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(held.Fd())) }

// layer puts a copy-on-write view of a directory at target; what is written goes below scratch.
func layer(source, target, scratch string, flags uintptr) error {
	upper, work := filepath.Join(scratch, "upper"), filepath.Join(scratch, "work")
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	for _, directory := range []string{upper, work} {
		if err := os.MkdirAll(directory, 0o755); err != nil {
			return err
		}
	}
	// The view's root directory looks like the one below it.
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("no status of " + source)
	}
	if err := os.Chown(upper, int(stat.Uid), int(stat.Gid)); err != nil {
		return err
	}
	if err := syscall.Chmod(upper, stat.Mode&0o7777); err != nil {
		return sys.PathError("chmod", upper, err)
	}
	return mount("overlay", target, "overlay", flags,
		"lowerdir="+source+",upperdir="+upper+",workdir="+work)
}

// mountPoint makes sure there is something to mount at: below a private /tmp there is nothing yet.
func mountPoint(source, target string) error {
	if _, err := os.Lstat(target); err == nil {
		return nil
	}
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return os.MkdirAll(target, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	return file.Close()
}

// makeReadOnly remounts what is mounted at a path and below it.
func makeReadOnly(root string) error {
	mounts, err := mounts()
	if err != nil {
		return err
	}
	done := false
	for _, each := range mounts {
		if !within(each.place, root) {
			continue
		}
		ended, err := each.makeReadOnly()
		if err != nil {
			if each.place != root && (errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.ENOENT)) {
				continue // covered by another mount
			}
			return err
		}
		done = done || each.place == root && !ended
	}
	if !done {
		return errors.New("not mounted at " + root)
	}
	return nil
}

// makeReadOnly remounts one mount. The kernel ends a mount in every namespace when a process removes its
// mount point in another one, so a mount that has ended meanwhile is no failure of itself.
func (m mounted) makeReadOnly() (ended bool, err error) {
	held, err := openPlain(m.place)
	if err == nil {
		err = mount("", heldPath(held), "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY|m.flags, "")
		held.Close()
	}
	if !errors.Is(err, syscall.EINVAL) {
		return false, err
	}
	present, listing := mounts()
	if listing != nil {
		return false, listing
	}
	if slices.ContainsFunc(present, func(each mounted) bool { return each.id == m.id }) {
		return false, err
	}
	return true, nil
}

// mounts lists the mounts of this process's namespace.
func mounts() ([]mounted, error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	return parseMountInfo(table), err
}

// mounted is one line of mountinfo: the kernel's number of the mount, its place and its flags.
type mounted struct {
	id    string
	place string
	flags uintptr
}

var mountFlags = map[string]uintptr{
	"nosuid": syscall.MS_NOSUID, "nodev": syscall.MS_NODEV, "noexec": syscall.MS_NOEXEC, "noatime": syscall.MS_NOATIME,
	"nodiratime": syscall.MS_NODIRATIME, "relatime": syscall.MS_RELATIME,
}

// parseMountInfo reads /proc/PID/mountinfo; a line it does not understand is left out.
func parseMountInfo(table []byte) []mounted {
	var list []mounted
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) < 6 || !filepath.IsAbs(fields[4]) {
			continue
		}
		each := mounted{id: fields[0], place: unescapeOctal(fields[4])}
		for option := range strings.SplitSeq(fields[5], ",") {
			each.flags |= mountFlags[option]
		}
		list = append(list, each)
	}
	return list
}

// unescapeOctal undoes the kernel's \040 and its like.
func unescapeOctal(text string) string {
	var out strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] == '\\' && i+3 < len(text) {
			if value, err := strconv.ParseUint(text[i+1:i+4], 8, 8); err == nil {
				out.WriteByte(byte(value))
				i += 3
				continue
			}
		}
		out.WriteByte(text[i])
	}
	return out.String()
}

package files

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sallyport.dev/execd/internal/sys"
	"sallyport.dev/execd/internal/testkit"
)

// elsewhere makes a directory on another file system than opened's, with full access for all users.
func elsewhere(t *testing.T) string {
	t.Helper()
	directory := testkit.Opened(t)
	mountedAt(t, "none", directory, "tmpfs", 0, "size=16m,mode=777")
	return directory
}

// meanwhile is a context that calls act when its Err method is called for the at-th time.
type meanwhile struct {
	context.Context
	asked, at int
	act       func() error
}

func (m *meanwhile) Err() error {
	if m.asked++; m.asked == m.at {
		return m.act()
	}
	return nil
}

func TestAMoveAcrossDevicesLeavesADestinationThatAppearsMeanwhile(t *testing.T) {
	f := newFixture(t)
	for _, source := range []string{"file", "directory", "link"} {
		from, target := testkit.Opened(t)+"/from", elsewhere(t)
		switch source {
		case "file":
			given(t, from, []byte("mine"), 0o644)
		case "directory":
			mustDo(t, os.Mkdir(from, 0o755))
			given(t, from+"/x", []byte("mine"), 0o644)
		case "link":
			mustDo(t, os.Symlink("mine", from))
		}
		ctx := &meanwhile{Context: t.Context(), at: 1, act: func() error {
			return errors.Join(os.Mkdir(target+"/to", 0o755), os.WriteFile(target+"/to/other", []byte("another's"), 0o644))
		}}
		err := f.files.moveOne(ctx, from, target+"/to")
		testkit.Equal(t, "destination exists: "+target+"/to", fmt.Sprint(err))
		testkit.Equal(t, "another's", testkit.MustRead(t, target+"/to/other"))
		onlyNames(t, target, "to")
		_, err = os.Lstat(from)
		testkit.Equal(t, true, err == nil)
	}
}

func TestAMoveAcrossDevicesEndsWithItsClient(t *testing.T) {
	f := newFixture(t)
	from, target := testkit.Opened(t)+"/from", elsewhere(t)
	mustDo(t, os.MkdirAll(from+"/a/b", 0o755))
	given(t, from+"/a/b/x", []byte("mine"), 0o644)
	for at := 1; at < 8; at++ {
		ctx := &meanwhile{Context: t.Context(), at: at, act: func() error { return context.Canceled }}
		err := f.files.moveOne(ctx, from, target+"/to")
		testkit.Equal(t, fmt.Sprint(context.Canceled), fmt.Sprint(err))
		onlyNames(t, target)
		testkit.Equal(t, "mine", testkit.MustRead(t, from+"/a/b/x"))
	}
}

func TestAMoveAcrossDevicesWithoutSpaceLeavesTheSource(t *testing.T) {
	f := newFixture(t)
	from, target := testkit.Opened(t)+"/from", elsewhere(t)
	mustDo(t, os.Mkdir(from, 0o755), os.Mkdir(from+"/sub", 0o755))
	given(t, from+"/sub/x", make([]byte, 20<<20), 0o644)
	err := f.files.moveOne(t.Context(), from, target+"/to")
	testkit.Equal(t, target+"/to/sub/x: no space left on device", sys.Explain(err))
	onlyNames(t, target)
	onlyNames(t, from+"/sub", "x")
}

// statOf returns the metadata that a move across devices keeps.
func statOf(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	s := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%o %d:%d %d.%09d %d.%09d", s.Mode, s.Uid, s.Gid, s.Mtim.Sec, s.Mtim.Nsec, s.Atim.Sec, s.Atim.Nsec)
}

func TestAMoveAcrossDevicesKeepsModesAndTimesOfReadOnlyDirectoriesToo(t *testing.T) {
	f := newFixture(t)
	for _, prefix := range []string{asOther, ""} {
		base := testkit.Opened(t)
		from, target := base+"/from", elsewhere(t)
		paths := []string{"", "/sub", "/sub/x", "/sub/link", "/empty"} // the metadata is compared in this order
		mustDo(t, os.MkdirAll(from+"/sub", 0o755), os.Mkdir(from+"/empty", 0o755), os.Symlink("nowhere", from+"/sub/link"))
		given(t, from+"/sub/x", []byte("content"), 0o444)
		for i, path := range []string{"/sub/x", "/sub/link", "/sub", "/empty", ""} {
			owner := 65534
			if prefix == "" && i == 0 {
				owner = 65012
			}
			mustDo(t, os.Lchown(from+path, owner, owner))
			switch path {
			case "/sub/x":
				mustDo(t, syscall.Chmod(from+path, 0o4555))
			case "/sub/link":
			case "/empty":
				mustDo(t, syscall.Chmod(from+path, 0o2500))
			default:
				mustDo(t, syscall.Chmod(from+path, 0o1555))
			}
			mustDo(t, setLinkTimes(from+path, syscall.Timespec{Sec: 1e9 + int64(i), Nsec: 123456789}, syscall.Timespec{Sec: 1.1e9, Nsec: 987654321}))
		}
		before := []string{}
		for _, path := range paths {
			before = append(before, statOf(t, from+path))
		}
		status, answer := f.Call("POST", prefix+"/files/mv", fmt.Sprintf(`[{"src":%q,"dest":%q}]`, from, target+"/to"))
		testkit.Equal(t, "200 ", fmt.Sprint(status, " ", answer))
		after := []string{}
		for _, path := range paths {
			after = append(after, statOf(t, target+"/to"+path))
		}
		testkit.Equal(t, before, after)
		onlyNames(t, base)
		onlyNames(t, target, "to")
		testkit.Equal(t, "content", testkit.MustRead(t, target+"/to/sub/x"))
	}
}

func TestAMoveAcrossDevicesMakesNoSetIDProgramOfAnotherOwner(t *testing.T) {
	f := newFixture(t)
	base, target := testkit.Opened(t), elsewhere(t)
	given(t, base+"/program", []byte("#!"), 0o755)
	mustDo(t, syscall.Chmod(base+"/program", 0o6755))
	status, answer := f.Call("POST", asOther+"/files/mv", fmt.Sprintf(`[{"src":%q,"dest":%q}]`, base+"/program", target+"/to"))
	testkit.Equal(t, "200 ", fmt.Sprint(status, " ", answer))
	testkit.Equal(t, true, strings.HasPrefix(statOf(t, target+"/to"), "100755 65534:65534 "))
}

func TestAMoveAcrossDevicesKeepsAttributes(t *testing.T) {
	f := newFixture(t)
	from, target := t.TempDir()+"/from", elsewhere(t)
	mustDo(t, os.Mkdir(from, 0o755))
	given(t, from+"/x", nil, 0o644)
	given(t, target+"/probe", nil, 0o644)
	for _, path := range []string{from, from + "/x"} {
		mustDo(t, syscall.Setxattr(path, "user.kept", []byte("v"), 0))
	}
	expected := ""
	if syscall.Setxattr(target+"/probe", "user.kept", []byte("v"), 0) == nil {
		expected = "v"
	}
	mustDo(t, f.files.moveOne(t.Context(), from, target+"/to"))
	for _, path := range []string{target + "/to", target + "/to/x"} {
		value := make([]byte, 8)
		n, _ := syscall.Getxattr(path, "user.kept", value)
		testkit.Equal(t, expected, string(value[:max(n, 0)]))
	}
}

func TestWhatCannotBeRemovedIsNotCopied(t *testing.T) {
	f := newFixture(t)
	base, target := closed(t), elsewhere(t)
	given(t, base+"/x", []byte("content"), 0o644)
	status, answer := f.Call("POST", asOther+"/files/mv", fmt.Sprintf(`[{"src":%q,"dest":%q}]`, base+"/x", target+"/to"))
	testkit.Equal(t, 500, status)
	testkit.Equal(t, true, strings.Contains(answer, base+"/x: permission denied"))
	onlyNames(t, target)
	testkit.Equal(t, "content", testkit.MustRead(t, base+"/x"))
}

func TestADirectoryIsNotMovedIntoItselfOverAMount(t *testing.T) {
	f := newFixture(t)
	base, shown := t.TempDir(), t.TempDir()
	from := base + "/from"
	mustDo(t, os.MkdirAll(from+"/mount", 0o755), os.Symlink(from+"/mount", base+"/link"))
	given(t, from+"/x", []byte("content"), 0o644)
	mountedAt(t, shown, from+"/mount", "", syscall.MS_BIND, "") // the same file system, but another mount
	err := f.files.moveOne(t.Context(), from, base+"/link/to")
	testkit.Equal(t, true, err != nil && strings.Contains(err.Error(), "into itself"))
	onlyNames(t, shown)
	onlyNames(t, from, "mount", "x")
}

func TestAnotherMountIsNotMovedAcrossDevices(t *testing.T) {
	f := newFixture(t)
	from, target := t.TempDir()+"/from", elsewhere(t)
	mustDo(t, os.MkdirAll(from+"/mount", 0o755))
	mountedAt(t, "none", from+"/mount", "tmpfs", 0, "")
	given(t, from+"/mount/x", []byte("content"), 0o644)
	err := f.files.moveOne(t.Context(), from, target+"/to")
	testkit.Equal(t, true, err != nil && strings.Contains(err.Error(), "cannot move a mount"))
	onlyNames(t, target)
	testkit.Equal(t, "content", testkit.MustRead(t, from+"/mount/x"))
}

// Some file systems do not support exclusive renaming.
func TestRenamingWithoutTheKernelsHelpReplacesNothing(t *testing.T) {
	for _, source := range []string{"file", "directory", "link"} {
		for _, target := range []string{"", "file", "directory", "link"} {
			base := t.TempDir()
			for name, kind := range map[string]string{"/from": source, "/to": target} {
				switch kind {
				case "file":
					given(t, base+name, []byte(name), 0o644)
				case "directory":
					mustDo(t, os.Mkdir(base+name, 0o750))
				case "link":
					mustDo(t, os.Symlink(name, base+name))
				}
			}
			err := renameOverOwn(base+"/from", base+"/to")
			if target == "" {
				mustDo(t, err)
				onlyNames(t, base, "to")
				continue
			}
			testkit.Equal(t, true, errors.Is(err, syscall.EEXIST))
			onlyNames(t, base, "from", "to")
		}
	}
}

func TestOnlyOnesOwnPlaceholderIsRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "to")
	given(t, path, []byte("mine"), 0o644)
	own, _ := os.Lstat(path)
	mustDo(t, os.Rename(path, path+"2"))
	given(t, path, []byte("another's"), 0o644)
	_ = removedAfter(syscall.EIO, path, own)
	testkit.Equal(t, "another's", testkit.MustRead(t, path))
	_ = removedAfter(syscall.EIO, path+"2", own)
	onlyNames(t, filepath.Dir(path), "to")
}

package files

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/testkit"
)

const asOther = "/v1/filesystem/65534/65534"

// closed makes a directory in which other users can use the existing files but create none.
func closed(t *testing.T) string {
	t.Helper()
	directory := testkit.Opened(t)
	mustDo(t, os.Chmod(directory, 0o755))
	return directory
}

// given writes a file with exactly this mode.
func given(t *testing.T, path string, content []byte, mode os.FileMode) {
	t.Helper()
	mustDo(t, os.WriteFile(path, content, 0o600), os.Chmod(path, mode))
}

func mustDo(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// mountedAt mounts a file system for the duration of a test.
func mountedAt(t *testing.T, source, target, kind string, flags uintptr, data string) {
	t.Helper()
	mustDo(t, syscall.Mount(source, target, kind, flags, data))
	t.Cleanup(func() { _ = syscall.Unmount(target, syscall.MNT_DETACH) })
}

// onlyNames compares the names in a directory, so that a remaining temporary file is found.
func onlyNames(t *testing.T, directory string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(directory)
	if err != nil {
		t.Fatal(err)
	}
	found := []string{}
	for _, entry := range entries {
		found = append(found, entry.Name())
	}
	testkit.Equal(t, append([]string{}, names...), found)
}

func TestAFileIsReplacedWhereItsDirectoryRefusesNewFiles(t *testing.T) {
	f := newFixture(t)
	for _, size := range []int{10, 3 << 20} { // kept in memory, kept in a file
		directory := closed(t)
		path := directory + "/x"
		text := strings.Repeat("a", size)
		for _, change := range []struct{ from, to string }{{"b", "longer"}, {"longer", "c"}} {
			given(t, path, []byte(text+change.from+text), 0o666)
			status, answer := f.Call("POST", asOther+"/files/replace?verbose=true",
				fmt.Sprintf(`{%q:{"old":%q,"new":%q}}`, path, change.from, change.to))
			testkit.Equal(t, fmt.Sprintf(`200 {%q:{"replacedCount":1}}`, path), fmt.Sprint(status, " ", answer))
			testkit.Equal(t, true, text+change.to+text == testkit.MustRead(t, path))
		}
		onlyNames(t, directory, "x")
	}
}

// brokenUpload sends a form that ends in the middle of its file, and closes the connection.
func (f *fixture) brokenUpload(prefix, path string, sent int) {
	f.T.Helper()
	connection, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
	if err != nil {
		f.T.Fatal(err)
	}
	defer connection.Close()
	form := "--B\r\nContent-Disposition: form-data; name=\"metadata\"\r\n\r\n" + fmt.Sprintf("{\"path\":%q}", path) + "\r\n" +
		"--B\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n" + strings.Repeat("n", sent)
	fmt.Fprintf(connection, "POST %s/files/upload HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Type: multipart/form-data; boundary=B\r\n"+
		"Content-Length: %d\r\n\r\n%s", prefix, httpx.TokenHeader, testkit.Token, len(form)+1000, form)
	_ = connection.(*net.TCPConn).CloseWrite()
	_, _ = io.Copy(io.Discard, connection) // until the daemon has closed the connection
}

func TestAnUploadThatBreaksOffLeavesTheFileAsItWas(t *testing.T) {
	f := newFixture(t)
	for _, sent := range []int{10, 3 << 20} {
		directory := closed(t)
		given(t, directory+"/x", []byte("the old content"), 0o666)
		f.brokenUpload(asOther, directory+"/x", sent) // written in place
		testkit.Equal(t, "the old content", testkit.MustRead(t, directory+"/x"))
		f.brokenUpload("", directory+"/x", sent) // written beside
		testkit.Equal(t, "the old content", testkit.MustRead(t, directory+"/x"))
		onlyNames(t, directory, "x")
	}
}

func TestAFileThatOthersOwnInAStickyDirectoryIsWrittenInPlace(t *testing.T) {
	f := newFixture(t)
	directory := testkit.Opened(t)
	given(t, directory+"/x", []byte("the old content"), 0o666)
	if err := os.Chmod(directory, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	before, _ := os.Stat(directory + "/x")
	status, answer := f.uploadAs(asOther, directory+"/x", "new", "")
	testkit.Equal(t, "200 ", fmt.Sprint(status, " ", answer))
	testkit.Equal(t, "new", testkit.MustRead(t, directory+"/x"))
	after, _ := os.Stat(directory + "/x")
	testkit.Equal(t, true, os.SameFile(before, after))
	onlyNames(t, directory, "x")
}

func TestAFileThatIsAMountIsWrittenInPlace(t *testing.T) {
	f := newFixture(t)
	small, shown := t.TempDir(), t.TempDir()
	mountedAt(t, "none", small, "tmpfs", 0, "size=128k")
	old := bytes.Repeat([]byte("o"), 64<<10)
	for _, flags := range []uintptr{0, syscall.MS_RDONLY} { // the rename returns EBUSY, the creation returns EROFS
		given(t, small+"/x", old, 0o644)
		directory := t.TempDir()
		mountedAt(t, shown, directory, "", syscall.MS_BIND, "")
		given(t, directory+"/x", nil, 0o644)
		mountedAt(t, small+"/x", directory+"/x", "", syscall.MS_BIND, "")
		if flags != 0 {
			if err := syscall.Mount("", directory, "", syscall.MS_BIND|syscall.MS_REMOUNT|flags, ""); err != nil {
				t.Fatal(err)
			}
		}
		status, answer := f.uploadFile(directory+"/x", strings.Repeat("n", 1<<20), "")
		testkit.Equal(t, 500, status)
		if !strings.Contains(answer, "no space left") || !strings.Contains(answer, "as it was") {
			t.Fatal(answer)
		}
		testkit.Equal(t, true, string(old) == testkit.MustRead(t, directory+"/x"))
		status, answer = f.uploadFile(directory+"/x", "new", `,"mode":640`)
		testkit.Equal(t, "200 ", fmt.Sprint(status, " ", answer))
		testkit.Equal(t, "new", testkit.MustRead(t, small+"/x"))
		info, _ := os.Stat(small + "/x")
		testkit.Equal(t, os.FileMode(0o640), info.Mode())
		onlyNames(t, directory, "x")
	}
}

func TestAFullDiskLeavesTheFileAsItWas(t *testing.T) {
	f := newFixture(t)
	small := t.TempDir()
	mountedAt(t, "none", small, "tmpfs", 0, "size=128k")
	given(t, small+"/x", []byte("an old content"), 0o644)
	status, answer := f.uploadFile(small+"/x", strings.Repeat("n", 1<<20), "")
	testkit.Equal(t, 500, status)
	testkit.Equal(t, true, strings.Contains(answer, small+"/x: no space left on device"))
	status, _ = f.Call("POST", "/files/replace", fmt.Sprintf(`{%q:{"old":"n","new":%q}}`, small+"/x", strings.Repeat("n", 1<<20)))
	testkit.Equal(t, 500, status)
	testkit.Equal(t, "an old content", testkit.MustRead(t, small+"/x"))
	onlyNames(t, small, "x")
}

// Overwriting a hole needs space. So the write fails in the middle of the old content.
func TestWhatWasOverwrittenBeforeAFailureIsPutBack(t *testing.T) {
	f := newFixture(t)
	small := t.TempDir()
	mountedAt(t, "none", small, "tmpfs", 0, "size=256k")
	given(t, small+"/x", bytes.Repeat([]byte("o"), 64<<10), 0o644)
	if err := os.Truncate(small+"/x", 1<<20); err != nil {
		t.Fatal(err)
	}
	old := testkit.MustRead(t, small+"/x")
	for _, size := range []int{1 << 20, 1<<20 + 4096, 1<<20 - 4096} {
		next := f.files.newSpool()
		_, _ = next.Write(bytes.Repeat([]byte("n"), size))
		err := f.files.overwrite(small+"/x", checked{mode: 0o600, setMode: true, uid: 1, gid: 1}, next)
		if err == nil || !strings.Contains(err.Error(), "as it was") {
			t.Fatal(err)
		}
		testkit.Equal(t, true, old == testkit.MustRead(t, small+"/x"))
		info, _ := os.Stat(small + "/x")
		stat := info.Sys().(*syscall.Stat_t)
		testkit.Equal(t, []uint32{0, 0, 0o644}, []uint32{stat.Uid, stat.Gid, stat.Mode & 0o7777})
	}
}

func TestAFailureThatCannotBeUndoneIsSaid(t *testing.T) {
	file, err := os.Create(t.TempDir() + "/x")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = file.WriteString("partly new")
	unread := overwriting{file: file, former: 10, kept: &spool{}}
	if err := unread.undo(syscall.ENOSPC, 4); !strings.Contains(err.Error(), "damaged") {
		t.Fatal(err)
	}
	file.Close()
	if err := unread.undo(syscall.ENOSPC, 0); !strings.Contains(err.Error(), "damaged") {
		t.Fatal(err)
	}
}

func TestNothingIsWrittenInPlaceIfTheModeIsRefused(t *testing.T) {
	f := newFixture(t)
	directory := closed(t)
	given(t, directory+"/x", []byte("old"), 0o666)
	status, _ := f.uploadAs(asOther, directory+"/x", "new", `,"mode":600`)
	testkit.Equal(t, 500, status)
	testkit.Equal(t, "old", testkit.MustRead(t, directory+"/x"))
	status, _ = f.uploadAs(asOther, directory+"/x", "new", `,"owner":"root"`)
	testkit.Equal(t, 500, status)
	testkit.Equal(t, "old", testkit.MustRead(t, directory+"/x"))
}

func TestAFileThatMayOnlyBeWrittenIsWrittenInPlace(t *testing.T) {
	f := newFixture(t)
	directory := closed(t)
	given(t, directory+"/x", []byte("an older content"), 0o622)
	status, answer := f.uploadAs(asOther, directory+"/x", "new", "")
	testkit.Equal(t, "200 ", fmt.Sprint(status, " ", answer))
	testkit.Equal(t, "new", testkit.MustRead(t, directory+"/x"))
	given(t, directory+"/x", []byte("old"), 0o644)
	status, _ = f.uploadAs(asOther, directory+"/x", "new", "")
	testkit.Equal(t, 500, status)
	testkit.Equal(t, "old", testkit.MustRead(t, directory+"/x"))
}

func TestContentBeyondMemoryNeedsAPlace(t *testing.T) {
	kept := &spool{places: []string{"/no/such/directory"}, limit: 4}
	n, err := kept.Write([]byte("1234"))
	testkit.Equal(t, true, n == 4 && err == nil)
	_, err = kept.Write([]byte("5"))
	testkit.Equal(t, true, err != nil && strings.Contains(err.Error(), "cannot be kept"))
	place := t.TempDir()
	kept = &spool{places: []string{"/no/such/directory", place}, limit: 4}
	defer kept.Close()
	for _, piece := range []string{"12", "345", "6789"} {
		if _, err := kept.Write([]byte(piece)); err != nil {
			t.Fatal(err)
		}
	}
	all, err := io.ReadAll(io.NewSectionReader(kept, 0, kept.length()))
	testkit.Equal(t, "123456789", string(all))
	testkit.Equal(t, true, err == nil)
	onlyNames(t, place) // the file has no name
}

// The kernel applies fs.protected_symlinks to the link at the end of a path.
func TestALinkIsFollowedIfTheKernelFollowsIt(t *testing.T) {
	f := newFixture(t)
	directory, target := testkit.Opened(t), t.TempDir()+"/target"
	given(t, target, []byte("old"), 0o644)
	if err := os.Symlink(target, directory+"/link"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Lchown(directory+"/link", 65534, 65534), os.Chmod(directory, 0o777|os.ModeSticky)); err != nil {
		t.Fatal(err)
	}
	file, refused := os.OpenFile(directory+"/link", os.O_WRONLY, 0)
	_ = file.Close()
	status, _ := f.uploadFile(directory+"/link", "new", "")
	testkit.Equal(t, refused == nil, status == 200)
	testkit.Equal(t, map[bool]string{true: "new", false: "old"}[refused == nil], testkit.MustRead(t, target))
}

func TestOtherNamesOfAReplacedFileKeepTheOldContent(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	given(t, directory+"/x", []byte("old"), 0o644)
	if err := os.Link(directory+"/x", directory+"/y"); err != nil {
		t.Fatal(err)
	}
	status, _ := f.uploadFile(directory+"/x", "new", "")
	testkit.Equal(t, 200, status)
	testkit.Equal(t, "new old", testkit.MustRead(t, directory+"/x")+" "+testkit.MustRead(t, directory+"/y"))
}

// accessList returns an ACL that permits the owning group only to read, and another group also to write.
func accessList() []byte {
	list := binary.LittleEndian.AppendUint32(nil, 2)
	for _, entry := range [][3]uint32{{1, 6, 1<<32 - 1}, {4, 4, 1<<32 - 1}, {8, 6, 65012}, {16, 6, 1<<32 - 1}, {32, 0, 1<<32 - 1}} {
		list = binary.LittleEndian.AppendUint16(list, uint16(entry[0]))
		list = binary.LittleEndian.AppendUint16(list, uint16(entry[1]))
		list = binary.LittleEndian.AppendUint32(list, entry[2])
	}
	return list
}

func TestAReplacedFileKeepsItsACLAndAttributes(t *testing.T) {
	f := newFixture(t)
	path := t.TempDir() + "/x"
	given(t, path, []byte("old"), 0o600)
	if err := errors.Join(syscall.Setxattr(path, attributeACL, accessList(), 0), syscall.Setxattr(path, "user.kept", []byte("v"), 0)); err != nil {
		t.Fatal(err)
	}
	status, _ := f.Call("POST", "/files/replace", fmt.Sprintf(`{%q:{"old":"old","new":"new"}}`, path))
	testkit.Equal(t, 200, status)
	testkit.Equal(t, "new", testkit.MustRead(t, path))
	value := make([]byte, 256)
	n, err := syscall.Getxattr(path, attributeACL, value)
	testkit.Equal(t, true, err == nil && bytes.Equal(accessList(), value[:n]))
	n, _ = syscall.Getxattr(path, "user.kept", value)
	testkit.Equal(t, "v", string(value[:n]))
	info, _ := os.Stat(path)
	testkit.Equal(t, os.FileMode(0o660), info.Mode())
}

func TestTheModeOfACopyWithoutItsACLGivesTheGroupNoMore(t *testing.T) {
	file, err := os.Open("/proc/self/status") // supports no attributes
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	testkit.Equal(t, uint32(0o640), keepAttributes(file, []attribute{{attributeACL, accessList()}}, 0o660))
	testkit.Equal(t, uint32(0o600), keepAttributes(file, []attribute{{attributeACL, []byte{2, 0, 0}}}, 0o660))
	testkit.Equal(t, uint32(0o660), keepAttributes(file, []attribute{{"user.x", nil}}, 0o660))
}

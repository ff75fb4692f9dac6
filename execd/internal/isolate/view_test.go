package isolate

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sallyport.dev/execd/internal/testkit"
)

func TestAMountThatHasEndedNeedNotBeReadOnly(t *testing.T) {
	point := filepath.Join(t.TempDir(), "point")
	if err := os.Mkdir(point, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", point, "tmpfs", syscall.MS_NOSUID, ""); err != nil {
		t.Fatal(err)
	}
	found := at(t, point)
	ended, err := found.makeReadOnly()
	testkit.Equal(t, nil, err)
	testkit.Equal(t, false, ended)
	options := optionsOf(t, point)
	testkit.Equal(t, true, strings.HasPrefix(options, "ro,"))

	if err := syscall.Unmount(point, 0); err != nil {
		t.Fatal(err)
	}
	ended, err = found.makeReadOnly() // the directory remains, and is no mount
	testkit.Equal(t, nil, err)
	testkit.Equal(t, true, ended)
}

func TestAMountThatCannotBeReadOnlyIsAFailure(t *testing.T) {
	covered := at(t, "/")
	covered.place = t.TempDir() // a path that leads elsewhere, as below another mount
	_, err := covered.makeReadOnly()
	testkit.Equal(t, true, errors.Is(err, syscall.EINVAL))
}

// at returns the uppermost mount at a path.
func at(t *testing.T, path string) mounted {
	t.Helper()
	list, err := mounts()
	if err != nil {
		t.Fatal(err)
	}
	var found mounted
	for _, each := range list {
		if each.place == path {
			found = each
		}
	}
	testkit.Equal(t, path, found.place)
	return found
}

// optionsOf returns the options of a mount as the kernel lists them.
func optionsOf(t *testing.T, path string) string {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); fields[4] == path {
			return fields[5]
		}
	}
	t.Fatal("not mounted: " + path)
	return ""
}

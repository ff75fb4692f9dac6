package files

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/testkit"
)

// filled makes directories with many names each, not in lexical order.
func filled(t *testing.T, directories, files int) string {
	t.Helper()
	root := t.TempDir()
	for d := range directories {
		directory := fmt.Sprintf("%s/%x", root, (d*7919)%directories)
		mustDo(t, os.Mkdir(directory, 0o755))
		for i := range files {
			given(t, fmt.Sprintf("%s/%d-%s", directory, (i*7919)%files, strings.Repeat("n", i%100)), nil, 0o644)
		}
	}
	return root
}

func (f *fixture) paths(route string) []string {
	f.T.Helper()
	status, answer := f.Call("GET", route, "")
	var infos []fileInfo
	if err := json.Unmarshal([]byte(answer), &infos); err != nil || status != 200 {
		f.T.Fatalf("%d %.200s", status, answer)
	}
	list := []string{}
	for _, info := range infos {
		list = append(list, info.Path)
	}
	return list
}

// A walk finds the same entries in the same order, independently of the number of names that it can hold.
func TestAWalkThatHoldsFewNamesFindsAllInOrder(t *testing.T) {
	f := newFixture(t)
	root := filled(t, 3, 300)
	var all, files []string
	mustDo(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if path != root {
			all = append(all, path)
		}
		if !entry.IsDir() {
			files = append(files, path)
		}
		return err
	}))
	for _, room := range []int{0, 20 << 10, 32 << 20} {
		f.files.limits.walkNames = room
		testkit.Equal(t, all, f.paths("/directories/list?depth=9&path="+root))
		testkit.Equal(t, files, f.paths("/files/search?path="+root))
	}
}

func TestAReaderHoldsNoMoreThanItsShare(t *testing.T) {
	root := filled(t, 1, 2000) + "/0"
	for _, left := range []int{0, 10_000, 100_000} {
		reader := nameReader{t.Context(), left}
		everything := func(nameEntry, bool) (bool, error) { return true, nil }
		held, more, err := reader.smallest(root, "", everything)
		mustDo(t, err)
		testkit.Equal(t, true, more && (sizeOf(held) <= left/2 || len(held) == heldMinimum))
		found := 0
		mustDo(t, reader.read(root, everything, func(nameEntry) error {
			found++
			testkit.Equal(t, true, reader.left >= left-max(left/2, heldMinimum*(255+nameOverhead)))
			return nil
		}))
		testkit.Equal(t, 2000, found)
		testkit.Equal(t, left, reader.left)
	}
}

func TestAnAnswerBeyondItsBoundIsAnErrorAndNotCut(t *testing.T) {
	f := newFixture(t)
	root := filled(t, 2, 10)
	f.files.limits.walkEntries = 20
	testkit.Equal(t, 20, len(f.paths("/files/search?path="+root)))
	testkit.Equal(t, 2, len(f.paths("/directories/list?path="+root)))
	status, answer := f.Call("GET", "/directories/list?depth=2&path="+root, "")
	testkit.Equal(t, 400, status)
	testkit.Equal(t, true, strings.Contains(answer, "more than 20 entries below "+root))
	given(t, root+"/one-more", nil, 0o644)
	status, _ = f.Call("GET", "/files/search?path="+root, "")
	testkit.Equal(t, 400, status)
	testkit.Equal(t, 1, len(f.paths("/files/search?pattern=one*&path="+root)))
	testkit.Equal(t, 3, len(f.paths("/directories/list?path="+root)))
}

// The tree grows after its entries were counted. The answer must not look complete.
func TestATreeThatGrowsBeyondTheBoundBreaksTheAnswerOff(t *testing.T) {
	f := newFixture(t)
	root := filled(t, 1, 10)
	f.files.limits.walkEntries = 5
	found := f.files.newWalk(t.Context(), root, -1, func(_ string, directory bool) bool { return !directory })
	err := found.each(func(string, fs.FileInfo) error { return nil })
	testkit.Equal(t, true, err != nil && strings.Contains(err.Error(), "more than 5"))
}

func TestReadingADirectoryEndsWithItsContext(t *testing.T) {
	root := filled(t, 1, 1500) + "/0"
	asked := 0
	ctx, cancel := context.WithCancel(t.Context())
	reader := nameReader{ctx, 1 << 20}
	err := reader.read(root, func(nameEntry, bool) (bool, error) {
		asked++
		cancel()
		return true, nil
	}, func(nameEntry) error { return errors.New("used") })
	testkit.Equal(t, true, errors.Is(err, context.Canceled))
	testkit.Equal(t, true, asked <= nameBatch)
	ctx, cancel = context.WithCancel(t.Context())
	used := 0
	reader = nameReader{ctx, 1 << 20}
	err = reader.read(root, func(nameEntry, bool) (bool, error) { return true, nil }, func(nameEntry) error {
		used++
		cancel()
		return nil
	})
	testkit.Equal(t, true, errors.Is(err, context.Canceled) && used == 1)
}

func TestASearchMayBeginAtALinkButNeverEntersOne(t *testing.T) {
	f := newFixture(t)
	root := t.TempDir()
	mustDo(t, os.Mkdir(root+"/real", 0o755), os.Symlink("real", root+"/link"))
	given(t, root+"/real/x", nil, 0o644)
	testkit.Equal(t, []string{root + "/link/x"}, f.paths("/files/search?path="+root+"/link"))
	testkit.Equal(t, []string{root + "/link", root + "/real/x"}, f.paths("/files/search?path="+root))
	_, err := openDirectory(root + "/link") // replaced after the parent was read
	testkit.Equal(t, true, err != nil)
}

func TestAPartialListIsAborted(t *testing.T) {
	f := newFixture(t)
	root := t.TempDir()
	for i := range 1000 { // more than fits into the buffer of the answer
		testkit.Equal(t, nil, os.WriteFile(filepath.Join(root, strconv.Itoa(i)), nil, 0o600))
	}
	for path, handler := range map[string]http.HandlerFunc{"/directories/list": f.files.walking(f.files.listOf), "/files/search": f.files.walking(f.files.searchOf)} {
		testkit.AbortedOnlyIfBroken(t, path, func(w http.ResponseWriter) {
			handler(w, httptest.NewRequest("GET", path+"?path="+root, nil))
		})
	}
}

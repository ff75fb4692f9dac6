package main

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const internal = "sallyport.dev/execd/internal/"

// handlers are the packages that serve the routes of the contract. They do not depend on each other.
var handlers = []string{"command", "files", "isolate", "jupyter", "session", "terminal"}

// leaves are the packages that the handlers use, in the order of their dependencies: each can import only those before
// it.
var leaves = []string{"sys", "account", "environ", "process", "httpx", "stream", "helper"}

// importsOf returns the packages below internal that the files of a directory import.
func importsOf(t *testing.T, directory string, tests bool) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	files, err := filepath.Glob(filepath.Join(directory, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") && !tests {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, each := range parsed.Imports {
			path, err := strconv.Unquote(each.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if name, ok := strings.CutPrefix(path, internal); ok && !(tests && strings.HasSuffix(name, filepath.Base(directory))) {
				found[name] = true
			}
		}
	}
	return found
}

func TestOnlyTheServerKnowsTheHandlers(t *testing.T) {
	entries, err := os.ReadDir("internal")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		name := entry.Name()
		for imported := range importsOf(t, filepath.Join("internal", name), true) {
			if name != "server" && slices.Contains(handlers, imported) {
				t.Errorf("%s imports the handlers of %s", name, imported)
			}
			if imported == "server" {
				t.Errorf("%s imports server", name)
			}
		}
		for imported := range importsOf(t, filepath.Join("internal", name), false) {
			if strings.HasPrefix(imported, "test") && !strings.HasPrefix(name, "test") {
				t.Errorf("%s imports %s, which is for tests", name, imported)
			}
			at, to := slices.Index(leaves, name), slices.Index(leaves, imported)
			if at >= 0 && (to < 0 || to >= at) {
				t.Errorf("%s imports %s, which is not below it", name, imported)
			}
			if name == "supervise" && to < 0 {
				t.Errorf("supervise imports %s", imported)
			}
		}
	}
}

func TestEveryPackageHasItsPlace(t *testing.T) {
	known := slices.Concat(handlers, leaves, []string{"server", "supervise", "testhost", "testkit"})
	err := filepath.WalkDir("internal", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") {
			return err
		}
		if name := filepath.Base(filepath.Dir(path)); !slices.Contains(known, name) {
			t.Errorf("%s is in a package that has no place in the layout", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

package session

import (
	"strings"
	"testing"

	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

func TestARunOfShHasNoDescriptorOfItsText(t *testing.T) {
	f := newFixture(t)
	f.launcher.Env.Bind(map[string]string{"PATH": testhost.WithoutBash(t.TempDir())})
	session := f.NewSession("{}")
	// Descriptor 3 is the directory that ls reads.
	testkit.Equal(t, []string{"0", "1", "2"}, f.In(session, "/bin/ls /proc/self/fd | /bin/sed '/3/d'").Stdout)
	testkit.Equal(t, []string{"0", "1", "2"}, f.In(session, "exec 3>/dev/null; (exec 3>&-; /bin/ls /proc/self/fd | /bin/sed '/3/d')").Stdout)
}

func TestATextMayBeLongerThanAnArgument(t *testing.T) {
	f := newFixture(t)
	f.launcher.Env.Bind(map[string]string{"PATH": testhost.WithoutBash(t.TempDir())})
	session := f.NewSession("{}")
	long := strings.Repeat("#", 1<<20) + "\n"
	testkit.Equal(t, "sh: 2: missing: not found", messages(f.In(session, long+"missing")))
}

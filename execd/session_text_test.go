package main

import (
	"strings"
	"testing"
)

func TestARunOfShHasNoDescriptorOfItsText(t *testing.T) {
	f := newSessionFixture(t)
	f.launcher.env.Bind(map[string]string{"PATH": withoutBash(t.TempDir())})
	session := f.newSession("{}")
	equal(t, []string{"0", "1", "2"}, f.in(session, "/bin/ls /proc/self/fd | /bin/sed '/3/d'").stdout) // 3 is the directory
	equal(t, []string{"0", "1", "2"}, f.in(session, "exec 3>/dev/null; (exec 3>&-; /bin/ls /proc/self/fd | /bin/sed '/3/d')").stdout)
}

func TestATextMayBeLongerThanAnArgument(t *testing.T) {
	f := newSessionFixture(t)
	f.launcher.env.Bind(map[string]string{"PATH": withoutBash(t.TempDir())})
	session := f.newSession("{}")
	long := strings.Repeat("#", 1<<20) + "\n"
	equal(t, "sh: 2: missing: not found", messages(f.in(session, long+"missing")))
}

package main

import (
	"os"
	"strings"
	"testing"
)

func TestEnvFileForms(t *testing.T) {
	lookup := mapLookup(map[string]string{"HOME": "/root"})
	text := "# comment\n\nPLAIN =  a b $HOME ${HOME}x $NONE. \nexport X=1\n1BAD=x\nS='a$HOME\nb\"'\n" +
		"D=\"t\\tq\\\"$HOME\\\\n\\$HOME\nline\\x\" # note\nOPEN='never closed\nLAST=1\nLAST=2\nJUNK='a'b\n"
	entries, skipped := parseEnvFile([]byte(text), false, lookup)
	equal(t, 4, skipped)
	values := map[string]string{}
	for _, entry := range entries {
		values[entry.key] = entry.value
	}
	equal(t, map[string]string{
		"PLAIN": "a b /root /rootx .", "S": "a$HOME\nb\"", "D": "t\tq\"/root\\n\\/root\nline\\x", "LAST": "2",
	}, values)
}

func TestValuesOfAnEnvFileAreBoundedWhateverTheyReferTo(t *testing.T) {
	lookup := mapLookup(map[string]string{"BIG": strings.Repeat("x", 64<<10), "S": "y"})
	for _, text := range []string{strings.Repeat("A=$BIG\n", 2000), strings.Repeat("A=\"$BIG$BIG$BIG\"\n", 2000)} {
		entries, skipped := parseEnvFile([]byte(text+"LAST=$S\n"), false, lookup)
		equal(t, 2001, len(entries)+skipped)
		total := 0
		for _, entry := range entries {
			total += len(entry.value)
			equal(t, true, len(entry.key+"="+entry.value) < envEntryLimit)
		}
		equal(t, true, total <= envFileLimit)
	}
	entries, skipped := parseEnvFile([]byte("A="+strings.Repeat("${", 60<<10)+"\nB=1\n"), false, lookup)
	equal(t, 0, skipped)
	equal(t, 2, len(entries))
}

func FuzzEnvFileNeverFailsAndRoundTrips(f *testing.F) {
	f.Add([]byte("A='b'\nC=\"d\\n\"\n"), "value")
	f.Fuzz(func(t *testing.T, data []byte, value string) {
		lookup := mapLookup(map[string]string{"A": "$A"})
		entries, _ := parseEnvFile(data, false, lookup)
		for _, entry := range entries {
			if !isVariableName(entry.key) || strings.IndexByte(entry.value, 0) >= 0 {
				t.Fatalf("%q", entry)
			}
		}
		if strings.ContainsAny(value, "'\x00") {
			return
		}
		written, skipped := parseEnvFile([]byte("K='"+value+"'\n"), false, lookup)
		equal(t, 0, skipped)
		equal(t, 1, len(written))
		if written[0].value != value {
			t.Fatalf("%q became %q", value, written[0].value)
		}
	})
}

func TestAccountsAreParsedStrictly(t *testing.T) {
	root := t.TempDir()
	os.Mkdir(root+"/etc", 0o755)
	os.WriteFile(root+"/etc/passwd", []byte("root:x:0:0::/root:/bin/sh\nshort:x:0:0\nplus:x:+5:5:::\nbig:x:4294967295:1:::\nuser:x:1000:100::/home/user:\n"), 0o644)
	os.WriteFile(root+"/etc/group", []byte("root:x:0:\nstaff:x:50:other,user\nbad:x:-1:user\nusers:x:100:user\n"), 0o644)
	accounts := LoadAccounts(root)
	equal(t, 2, len(accounts.users))
	credential, _ := accounts.Identity(1000, nil)
	equal(t, uint32(100), credential.Gid)
	equal(t, []uint32{50, 100}, credential.Groups)
	credential, _ = accounts.Identity(4242, nil)
	equal(t, uint32(4242), credential.Gid)
	equal(t, 0, len(credential.Groups))
	_, err := accounts.UserID("plus")
	equal(t, true, err != nil)
	uid, _ := accounts.UserID("77")
	equal(t, uint32(77), uid)
	equal(t, "77", accounts.UserName(77))
	equal(t, Accounts{}, LoadAccounts(root+"/nowhere"))
}

func TestPathVariablesAreExpandedOnlyIfDefined(t *testing.T) {
	lookup := mapLookup(map[string]string{"A": "x", "EMPTY": ""})
	for text, expected := range map[string]string{
		"$A/${A}b": "x/xb", "$5 $$ $ ${} ${A": "$5 $$ $ ${} ${A", "$NONE ${NONE}": "$NONE ${NONE}", "a${EMPTY}b": "ab",
	} {
		equal(t, expected, expandVariables(text, lookup, keepUndefined))
	}
}

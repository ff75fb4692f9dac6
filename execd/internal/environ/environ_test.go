package environ

import (
	"strings"
	"testing"

	"sallyport.dev/execd/internal/testkit"
)

func TestEnvFileForms(t *testing.T) {
	lookup := LookupIn(map[string]string{"HOME": "/root"})
	text := "# comment\n\nPLAIN =  a b $HOME ${HOME}x $NONE. \nexport X=1\n1BAD=x\nS='a$HOME\nb\"'\n" +
		"D=\"t\\tq\\\"$HOME\\\\n\\$HOME\nline\\x\" # note\nOPEN='never closed\nLAST=1\nLAST=2\nJUNK='a'b\n"
	entries, skipped := parseEnvFile([]byte(text), false, lookup)
	testkit.Equal(t, 4, skipped)
	values := map[string]string{}
	for _, entry := range entries {
		values[entry.key] = entry.value
	}
	testkit.Equal(t, map[string]string{
		"PLAIN": "a b /root /rootx .", "S": "a$HOME\nb\"", "D": "t\tq\"/root\\n\\/root\nline\\x", "LAST": "2",
	}, values)
}

func TestValuesOfAnEnvFileAreBoundedWhateverTheyReferTo(t *testing.T) {
	lookup := LookupIn(map[string]string{"BIG": strings.Repeat("x", 64<<10), "S": "y"})
	for _, text := range []string{strings.Repeat("A=$BIG\n", 2000), strings.Repeat("A=\"$BIG$BIG$BIG\"\n", 2000)} {
		entries, skipped := parseEnvFile([]byte(text+"LAST=$S\n"), false, lookup)
		testkit.Equal(t, 2001, len(entries)+skipped)
		total := 0
		for _, entry := range entries {
			total += len(entry.value)
			testkit.Equal(t, true, len(entry.key+"="+entry.value) < envEntryLimit)
		}
		testkit.Equal(t, true, total <= envFileLimit)
	}
	entries, skipped := parseEnvFile([]byte("A="+strings.Repeat("${", 60<<10)+"\nB=1\n"), false, lookup)
	testkit.Equal(t, 0, skipped)
	testkit.Equal(t, 2, len(entries))
}

func FuzzEnvFileNeverFailsAndRoundTrips(f *testing.F) {
	f.Add([]byte("A='b'\nC=\"d\\n\"\n"), "value")
	f.Fuzz(func(t *testing.T, data []byte, value string) {
		lookup := LookupIn(map[string]string{"A": "$A"})
		entries, _ := parseEnvFile(data, false, lookup)
		for _, entry := range entries {
			if !IsName(entry.key) || strings.IndexByte(entry.value, 0) >= 0 {
				t.Fatalf("%q", entry)
			}
		}
		if strings.ContainsAny(value, "'\x00") {
			return
		}
		written, skipped := parseEnvFile([]byte("K='"+value+"'\n"), false, lookup)
		testkit.Equal(t, 0, skipped)
		testkit.Equal(t, 1, len(written))
		if written[0].value != value {
			t.Fatalf("%q became %q", value, written[0].value)
		}
	})
}

func TestPathVariablesAreExpandedOnlyIfDefined(t *testing.T) {
	lookup := LookupIn(map[string]string{"A": "x", "EMPTY": ""})
	for text, expected := range map[string]string{
		"$A/${A}b": "x/xb", "$5 $$ $ ${} ${A": "$5 $$ $ ${} ${A", "$NONE ${NONE}": "$NONE ${NONE}", "a${EMPTY}b": "ab",
	} {
		testkit.Equal(t, expected, Expand(text, lookup, KeepUndefined))
	}
}

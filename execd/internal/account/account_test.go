package account

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/testkit"
)

func TestAccountsAreParsedStrictly(t *testing.T) {
	root := t.TempDir()
	os.Mkdir(root+"/etc", 0o755)
	os.WriteFile(root+"/etc/passwd", []byte("root:x:0:0::/root:/bin/sh\nshort:x:0:0\nplus:x:+5:5:::\nbig:x:4294967295:1:::\nuser:x:1000:100::/home/user:\n"), 0o644)
	os.WriteFile(root+"/etc/group", []byte("root:x:0:\nstaff:x:50:other,user\nbad:x:-1:user\nusers:x:100:user\n"), 0o644)
	accounts := Load(root)
	testkit.Equal(t, 2, len(accounts.users))
	credential, _ := accounts.Identity(1000, nil)
	testkit.Equal(t, uint32(100), credential.Gid)
	testkit.Equal(t, []uint32{50, 100}, credential.Groups)
	credential, _ = accounts.Identity(4242, nil)
	testkit.Equal(t, uint32(4242), credential.Gid)
	testkit.Equal(t, 0, len(credential.Groups))
	_, err := accounts.UserID("plus")
	testkit.Equal(t, true, err != nil)
	uid, _ := accounts.UserID("77")
	testkit.Equal(t, uint32(77), uid)
	testkit.Equal(t, "77", accounts.UserName(77))
	testkit.Equal(t, Accounts{}, Load(root+"/nowhere"))
}

func FuzzAccounts(f *testing.F) {
	f.Add([]byte("root:x:0:0:root:/root:/bin/sh\nu:x:4294967295:1::/:\nu2:x:+1:1::/:\n+::::::\n"), []byte("g:x:5:root,u\nbad:x:-1:\n"), uint32(0))
	f.Fuzz(func(t *testing.T, passwd, group []byte, uid uint32) {
		accounts := Accounts{users: parsePasswd(passwd), groups: parseGroup(group)}
		for _, user := range accounts.users {
			if user.name == "" || strings.ContainsAny(user.name, ":\n\x00") || user.uid == 1<<32-1 || user.gid == 1<<32-1 {
				t.Fatalf("%+v", user)
			}
		}
		credential, err := accounts.Identity(uid, nil)
		if (err == nil) == (uid == 1<<32-1) {
			t.Fatal(err)
		}
		if err == nil && (credential.Uid != uid || len(credential.Groups) > groupCountLimit) {
			t.Fatalf("%+v for %d", credential, uid)
		}
		if _, known := accounts.userByID(uid); err == nil && !known && (credential.Gid != uid || len(credential.Groups) > 0) {
			t.Fatalf("an unknown account got %+v", credential)
		}
		if !filepath.IsAbs(accounts.Home(uid)) {
			t.Fatal("a home that is not absolute")
		}
	})
}

// Package account reads accounts from /etc/passwd and /etc/group, files only: no nsswitch,
// no NSS module, hence no code of the image runs in the daemon.
//
// Invariants
//   - A line that is not exactly well formed is skipped, never guessed at.
//   - Input is bounded; only regular files are read.
//   - Not found is an explicit answer; no lookup falls back to root.
package account

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"sallyport.dev/execd/internal/sys"
)

const (
	accountFileLimit = 4 << 20
	groupCountLimit  = 65536
)

type userEntry struct {
	name string
	uid  uint32
	gid  uint32
	home string
}

type groupEntry struct {
	name    string
	gid     uint32
	members []string
}

// Accounts answers questions about the image's users and groups.
type Accounts struct {
	users  []userEntry
	groups []groupEntry
}

// Load reads both files below a root; what is missing is empty.
func Load(root string) Accounts {
	return Accounts{
		users:  parsePasswd(sys.ReadRegular(root+"/etc/passwd", accountFileLimit)),
		groups: parseGroup(sys.ReadRegular(root+"/etc/group", accountFileLimit)),
	}
}

func parsePasswd(data []byte) []userEntry {
	var users []userEntry
	for line := range bytes.Lines(data) {
		fields, ok := accountFields(line, 7)
		if !ok {
			continue
		}
		uid, okUID := parseID(fields[2])
		gid, okGID := parseID(fields[3])
		if !okUID || !okGID {
			continue
		}
		users = append(users, userEntry{name: fields[0], uid: uid, gid: gid, home: fields[5]})
	}
	return users
}

func parseGroup(data []byte) []groupEntry {
	var groups []groupEntry
	for line := range bytes.Lines(data) {
		fields, ok := accountFields(line, 4)
		if !ok {
			continue
		}
		gid, ok := parseID(fields[2])
		if !ok {
			continue
		}
		group := groupEntry{name: fields[0], gid: gid}
		for member := range strings.SplitSeq(fields[3], ",") {
			if member != "" {
				group.members = append(group.members, member)
			}
		}
		groups = append(groups, group)
	}
	return groups
}

// accountFields splits a line into exactly count fields with a usable name.
func accountFields(line []byte, count int) ([]string, bool) {
	text := strings.TrimSuffix(string(line), "\n")
	if strings.IndexByte(text, 0) >= 0 {
		return nil, false
	}
	fields := strings.Split(text, ":")
	if len(fields) != count || fields[0] == "" || strings.ContainsAny(fields[0], " \t#+,/") {
		return nil, false
	}
	return fields, true
}

// parseID accepts plain decimal 0…4294967294; 2^32-1 means "no change" to the kernel.
func parseID(text string) (uint32, bool) {
	if text == "" || len(text) > 10 || strings.Trim(text, "0123456789") != "" {
		return 0, false
	}
	value, err := strconv.ParseUint(text, 10, 32)
	if err != nil || value == 0xffffffff {
		return 0, false
	}
	return uint32(value), true
}

func (a Accounts) userByID(uid uint32) (userEntry, bool) {
	for _, user := range a.users {
		if user.uid == uid {
			return user, true
		}
	}
	return userEntry{}, false
}

// UserName is the account's name, or the number for an unknown one.
func (a Accounts) UserName(uid uint32) string {
	if user, ok := a.userByID(uid); ok {
		return user.name
	}
	return strconv.FormatUint(uint64(uid), 10)
}

// GroupName is the group's name, or the number for an unknown one.
func (a Accounts) GroupName(gid uint32) string {
	for _, group := range a.groups {
		if group.gid == gid {
			return group.name
		}
	}
	return strconv.FormatUint(uint64(gid), 10)
}

// UserID resolves a name, or a number written as text.
func (a Accounts) UserID(name string) (uint32, error) {
	for _, user := range a.users {
		if user.name == name {
			return user.uid, nil
		}
	}
	if uid, ok := parseID(name); ok {
		return uid, nil
	}
	return 0, fmt.Errorf("unknown user %s", strconv.QuoteToASCII(name))
}

// GroupID resolves a name, or a number written as text.
func (a Accounts) GroupID(name string) (uint32, error) {
	for _, group := range a.groups {
		if group.name == name {
			return group.gid, nil
		}
	}
	if gid, ok := parseID(name); ok {
		return gid, nil
	}
	return 0, fmt.Errorf("unknown group %s", strconv.QuoteToASCII(name))
}

// ErrBadIdentity marks a request that names an impossible identity.
var ErrBadIdentity = errors.New("uid and gid must be between 0 and 4294967294")

// Identity builds the credential for a uid and an optional gid: the account's
// primary and supplementary groups if known, else gid = uid and none.
func (a Accounts) Identity(uid uint32, gid *uint32) (*syscall.Credential, error) {
	if uid == 0xffffffff || (gid != nil && *gid == 0xffffffff) {
		return nil, ErrBadIdentity
	}
	credential := &syscall.Credential{Uid: uid, Gid: uid}
	if user, known := a.userByID(uid); known {
		credential.Gid, credential.Groups = user.gid, a.groupsOf(user.name)
	}
	if gid != nil {
		credential.Gid = *gid
	}
	return credential, nil
}

// groupsOf are the supplementary groups of an account.
func (a Accounts) groupsOf(name string) []uint32 {
	var ids []uint32
	for _, group := range a.groups {
		if len(ids) == groupCountLimit {
			break
		}
		if slices.Contains(group.members, name) {
			ids = append(ids, group.gid)
		}
	}
	return ids
}

// Home is the account's home directory, "/" if unknown.
func (a Accounts) Home(uid uint32) string {
	if user, ok := a.userByID(uid); ok && strings.HasPrefix(user.home, "/") {
		return user.home
	}
	return "/"
}

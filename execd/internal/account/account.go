// Package account reads accounts from /etc/passwd and /etc/group only. It uses no nsswitch and no NSS module, so that
// no code of the image runs in the daemon.
//
// Invariants
//   - A line that is not well formed is skipped; no part of it is used.
//   - Input is bounded; only regular files are read.
//   - If an account is not found, the result says so; no lookup falls back to root.
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

// Accounts holds the image's users and groups.
type Accounts struct {
	users  []userEntry
	groups []groupEntry
}

// Load reads both files below a root directory. A file that is missing, not regular or too large counts as empty.
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

// accountFields splits a line into its fields. It returns false unless there are count fields and the name is usable.
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

// parseID parses a decimal number from 0 to 4294967294. It refuses 2^32-1, which means "no change" to the kernel.
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

// UserName returns the name of a user, or the number if the user is unknown.
func (a Accounts) UserName(uid uint32) string {
	if user, ok := a.userByID(uid); ok {
		return user.name
	}
	return strconv.FormatUint(uint64(uid), 10)
}

// GroupName returns the name of a group, or the number if the group is unknown.
func (a Accounts) GroupName(gid uint32) string {
	for _, group := range a.groups {
		if group.gid == gid {
			return group.name
		}
	}
	return strconv.FormatUint(uint64(gid), 10)
}

// UserID returns the uid for a name, or for a number written as text.
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

// GroupID returns the gid for a name, or for a number written as text.
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

// ErrBadIdentity is the error for a uid or gid that is out of range.
var ErrBadIdentity = errors.New("uid and gid must be between 0 and 4294967294")

// Identity returns the credential for a uid and an optional gid. A known account gets its primary group and its
// supplementary groups. An unknown account gets gid = uid and no supplementary groups. A given gid replaces the gid.
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

// groupsOf returns the supplementary groups of an account, at most groupCountLimit.
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

// Home returns the home directory of an account, or "/" if it is unknown or not absolute.
func (a Accounts) Home(uid uint32) string {
	if user, ok := a.userByID(uid); ok && strings.HasPrefix(user.home, "/") {
		return user.home
	}
	return "/"
}

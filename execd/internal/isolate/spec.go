package isolate

// The specification of an isolated session: its request, checked and resolved.
//
// Invariants
//   - Every path is absolute, clean and free of links where it names a place of a mount. Places of the system
//     and of this daemon cannot be mounted over.
//   - The source of a bind, and each additional writable path, is inside an allowed directory after
//     its links were resolved.
//   - Nothing is created here. view.go creates the view.

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
)

const (
	DefaultRoot = "/var/lib/execd/isolation" // upper directories of sessions
	mountLimit  = 16
	upperLimit  = 8 << 30
	scanLimit   = 1 << 20 // entries looked at to measure
)

// bindSources are the allowed places of the source of a bind, and of additional writable paths.
var bindSources = []string{"/workspace", "/mnt", "/media", "/data"}

// systemPlaces cannot be mounted over.
var systemPlaces = []string{"/proc", "/sys", "/dev", "/opt/opensandbox"}

type request struct {
	Workspace   *overlay     `json:"workspace"`
	Overlays    []overlay    `json:"overlays"`
	Profile     *string      `json:"profile"`
	Binds       []bind       `json:"binds"`
	Writable    []string     `json:"extra_writable"`
	ShareNet    *bool        `json:"share_net"`
	Env         *environment `json:"env_passthrough"`
	UID         *int64       `json:"uid"`
	GID         *int64       `json:"gid"`
	UIDMode     *string      `json:"uid_mode"`
	IdleSeconds *int64       `json:"idle_timeout_seconds"`
}

type environment struct {
	Mode string   `json:"mode"`
	Keys []string `json:"keys"`
}

type overlay struct {
	Path    string  `json:"path"`
	Mode    *string `json:"mode,omitempty"`
	Persist *bool   `json:"persist,omitempty"`
}

type bind struct {
	Source   string  `json:"source"`
	Dest     *string `json:"dest,omitempty"`
	ReadOnly *bool   `json:"readonly,omitempty"`
}

// Kinds of mounts of a view.
const (
	viewOverlay  = "overlay" // copy on write, into a directory of the session's
	viewMemory   = "memory"  // copy on write, into memory
	viewWritable = "rw"
	viewReadOnly = "ro"
)

// viewMount mounts Source, or a copy-on-write view of it, at Target.
type viewMount struct{ Kind, Source, Target string }

// viewPlan is the view that view.go creates.
type viewPlan struct {
	ID         string
	Root       string // of all sessions; not visible in the view
	Scratch    string // a directory of the session's own, below it
	Mounts     []viewMount
	PrivateTmp bool
	Directory  string // where the session begins
	Logs       bool   // Directory can take the output of background runs
	Env        []string
	UID, GID   uint32
	Groups     []uint32
	Switch     bool // to that identity
}

func notSupported(message string) *httpx.Problem {
	return httpx.NewProblem(http.StatusServiceUnavailable, "NOT_SUPPORTED", message)
}

// plan checks a request. Its scratch directory is named later.
func (r *request) plan(root string) (*viewPlan, error) {
	if r.Workspace != nil {
		r.Overlays = append([]overlay{*r.Workspace}, r.Overlays...)
	}
	if len(r.Overlays) == 0 {
		return nil, httpx.BadRequest("at least one of workspace and overlays is required")
	}
	if len(r.Overlays)+len(r.Binds)+len(r.Writable) > mountLimit {
		return nil, httpx.BadRequest(fmt.Sprintf("more than %d mounts", mountLimit))
	}
	made := &viewPlan{Root: root, PrivateTmp: true}
	switch profile := text(r.Profile, "strict"); profile {
	case "strict":
	case "balanced":
		made.PrivateTmp = false
	default:
		return nil, httpx.BadRequest("profile is strict or balanced")
	}
	if r.IdleSeconds != nil && (*r.IdleSeconds < 0 || *r.IdleSeconds > 1<<31) {
		return nil, httpx.BadRequest("idle_timeout_seconds must be 0 or more")
	}
	switch text(r.UIDMode, "setpriv") {
	case "setpriv":
	case "userns":
		return nil, notSupported("uid_mode userns is not available")
	default:
		return nil, httpx.BadRequest("uid_mode is setpriv or userns")
	}
	for i := range r.Overlays {
		mount, err := r.Overlays[i].mount()
		if err != nil {
			return nil, err
		}
		made.Mounts = append(made.Mounts, mount)
	}
	made.Directory, made.Logs = made.Mounts[0].Target, made.Mounts[0].Kind == viewWritable || made.Mounts[0].Kind == viewOverlay
	for _, path := range r.Writable {
		if err := mountPlace(path, false); err != nil { // it leads through no link
			return nil, err
		}
		if err := allowedSource(path); err != nil {
			return nil, err
		}
		made.Mounts = append(made.Mounts, viewMount{viewWritable, path, path})
	}
	for _, bind := range r.Binds {
		mount, err := bind.mount()
		if err != nil {
			return nil, err
		}
		made.Mounts = append(made.Mounts, mount)
	}
	// A deeper mount shadows the one above it.
	slices.SortStableFunc(made.Mounts, func(a, b viewMount) int {
		return cmp.Compare(strings.Count(a.Target, "/"), strings.Count(b.Target, "/"))
	})
	seen := map[string]bool{}
	for _, mount := range made.Mounts {
		if within(mount.Source, root) || within(root, mount.Source) || within(root, mount.Target) || within(mount.Target, root) {
			return nil, httpx.BadRequest("cannot mount what holds the sessions themselves")
		}
		if seen[mount.Target] {
			return nil, httpx.BadRequest("a path is mounted at twice")
		}
		seen[mount.Target] = true
	}
	return made, nil
}

func text(given *string, otherwise string) string {
	if given == nil || *given == "" {
		return otherwise
	}
	return *given
}

func (o *overlay) mount() (viewMount, error) {
	mode := text(o.Mode, viewOverlay)
	o.Mode = &mode
	switch mode {
	case viewWritable, viewReadOnly:
		if o.Persist != nil {
			return viewMount{}, httpx.BadRequest("persist is for mode overlay only")
		}
	case viewOverlay:
		if strings.ContainsAny(o.Path, `,:\`) {
			return viewMount{}, httpx.BadRequest(`the path of an overlay must not hold , : or \`)
		}
		if o.Persist != nil && !*o.Persist {
			mode = viewMemory
		}
	default:
		return viewMount{}, httpx.BadRequest("mode is rw, overlay or ro")
	}
	return viewMount{mode, o.Path, o.Path}, mountPlace(o.Path, true)
}

func (b *bind) mount() (viewMount, error) {
	if err := absolute(b.Source); err != nil {
		return viewMount{}, err
	}
	source, err := filepath.EvalSymlinks(b.Source)
	if err != nil {
		return viewMount{}, httpx.BadRequest("a bind's source is not accessible: " + sys.Reason(err))
	}
	if err := allowedSource(source); err != nil {
		return viewMount{}, err
	}
	kind := viewWritable
	if b.ReadOnly != nil && *b.ReadOnly {
		kind = viewReadOnly
	}
	target := text(b.Dest, source)
	return viewMount{kind, source, target}, mountPlace(target, false)
}

// allowedSource checks a path without links that a session gets in addition to its overlays.
func allowedSource(path string) error {
	if slices.ContainsFunc(bindSources, func(allowed string) bool { return within(path, allowed) }) {
		return nil
	}
	return httpx.BadRequest("binds and extra_writable must lie in " + strings.Join(bindSources, ", "))
}

// within reports whether a clean path is a place or below it.
func within(path, place string) bool {
	return path == place || strings.HasPrefix(path, strings.TrimSuffix(place, "/")+"/")
}

func absolute(path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || strings.IndexByte(path, 0) >= 0 || len(path) > 4096 {
		return httpx.BadRequest("mounts need absolute, clean paths")
	}
	return nil
}

// mountPlace checks the place of a mount.
func mountPlace(path string, directory bool) error {
	if err := absolute(path); err != nil {
		return err
	}
	for _, place := range systemPlaces {
		if within(path, place) || path == "/" {
			return httpx.BadRequest("cannot mount at " + strconv.QuoteToASCII(path))
		}
	}
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return httpx.BadRequest("a path of a mount is not accessible: " + sys.Reason(err))
	}
	if resolved != path {
		return httpx.BadRequest("a path of a mount must not lead through a symbolic link")
	}
	if info, err := os.Stat(path); err != nil || (directory && !info.IsDir()) {
		return httpx.BadRequest("an overlay's path must be a directory")
	}
	return nil
}

// identity resolves the user, the group and the other groups of the session.
func (r *request) identity(plan *viewPlan, launcher *process.Launcher) error {
	plan.UID, plan.GID = uint32(os.Geteuid()), uint32(os.Getegid())
	if r.UID == nil && r.GID == nil {
		return nil
	}
	if r.UID == nil {
		own := int64(plan.UID)
		r.UID = &own
	}
	credential, err := launcher.Identity(r.UID, r.GID)
	if err != nil {
		return httpx.BadRequest(err.Error())
	}
	if credential == nil {
		return nil
	}
	if os.Geteuid() != 0 {
		return notSupported("another identity needs a daemon that runs as root")
	}
	plan.UID, plan.GID, plan.Groups, plan.Switch = credential.Uid, credential.Gid, credential.Groups, true
	return nil
}

// environment selects the variables of a session.
func (r *request) environment(given map[string]string) ([]string, error) {
	delete(given, "EXECD_ENVS")
	if r.Env != nil {
		allow := r.Env.Mode == "allow"
		if !allow && r.Env.Mode != "deny" && r.Env.Mode != "" {
			return nil, httpx.BadRequest("env_passthrough.mode is allow or deny")
		}
		for name := range given {
			if slices.Contains(r.Env.Keys, name) != allow {
				delete(given, name)
			}
		}
	}
	return environ.List(given), nil
}

// namespaces are the new ones of a session.
func (r *request) namespaces() uintptr {
	flags := uintptr(syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC)
	if r.ShareNet != nil && !*r.ShareNet {
		flags |= syscall.CLONE_NEWNET
	}
	return flags
}

var errTooMuchWritten = errors.New("isolated sessions have written too much; delete some")

// measureUppers fails if sessions have written more than their limit.
func measureUppers(root string) error {
	total, entries := int64(0), 0
	err := filepath.WalkDir(root, func(_ string, entry os.DirEntry, err error) error {
		if err != nil {
			return nil // what vanishes meanwhile takes no room
		}
		if info, err := entry.Info(); err == nil {
			if stat, ok := info.Sys().(*syscall.Stat_t); ok {
				total += stat.Blocks * 512
			}
		}
		if entries++; total >= upperLimit || entries > scanLimit {
			return errTooMuchWritten
		}
		return nil
	})
	if errors.Is(err, errTooMuchWritten) {
		return httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, err.Error())
	}
	return nil
}

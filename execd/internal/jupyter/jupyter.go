package jupyter

// The REST side of a Jupyter server.
//
// Invariants
//   - The token goes to the configured server only: no redirect is followed, no
//     proxy is used.
//   - Answers are bounded in size; each call in time.
//   - A start that fails, or that the caller gives up, leaves no kernel. What the server may
//     have made behind a lost answer is looked for by its name.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"sallyport.dev/execd/internal/httpx"
)

const (
	jupyterCall    = 30 * time.Second
	jupyterAnswer  = 8 << 20
	jupyterStartup = 60 * time.Second
	jupyterPause   = 200 * time.Millisecond
	jupyterSearch  = 30 * time.Second // for what a lost answer was about
)

var errNoJupyter = errors.New("this sandbox has no Jupyter server (JUPYTER_HOST): create it from the image sallyport/code-interpreter")

// errNoKernel means that no kernel for a language is installed, or not yet.
var errNoKernel = errors.New("no kernel for this language")

// Jupyter is a client of one Jupyter server.
type Jupyter struct {
	base  *url.URL // nil: none is configured
	token string
	http  *http.Client
}

// NewJupyter takes the address of a server, which may be empty.
func NewJupyter(host, token string) (*Jupyter, error) {
	if host == "" {
		return &Jupyter{}, nil
	}
	base, err := url.Parse(host)
	if err != nil || (base.Scheme != "http" && base.Scheme != "https") || base.Host == "" {
		return &Jupyter{}, errors.New("JUPYTER_HOST must begin with http:// or https://")
	}
	return &Jupyter{base: base, token: token, http: &http.Client{
		Timeout:       jupyterCall,
		Transport:     &http.Transport{MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Minute},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// jupyterSession is what the server calls a session: a kernel and its id.
type jupyterSession struct {
	ID     string `json:"id"`
	Path   string `json:"path"`
	Kernel struct {
		ID string `json:"id"`
	} `json:"kernel"`

	interruptedByMessage bool // on the control channel, not by SIGINT
}

// at is the address of a route; scheme "" is the server's own.
func (j *Jupyter) at(route string, query url.Values) *url.URL {
	address := *j.base
	address.Path = path.Join("/", j.base.Path, route)
	address.RawQuery = query.Encode()
	return &address
}

// jupyterRefusal is an answer that is an error: nothing was done.
type jupyterRefusal struct {
	status int
	route  string
}

func (e *jupyterRefusal) Error() string {
	return fmt.Sprintf("jupyter answers %d to %s", e.status, e.route)
}

// call sends a request and decodes the answer, if into is not nil.
func (j *Jupyter) call(ctx context.Context, method, route string, body, into any) error {
	var reader io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return err
		}
		reader = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(ctx, method, j.at(route, nil).String(), reader)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Token "+j.token)
	request.Header.Set("Content-Type", "application/json")
	response, err := j.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer := io.LimitReader(response.Body, jupyterAnswer)
	if response.StatusCode >= http.StatusMultipleChoices {
		_, _ = io.Copy(io.Discard, answer)
		return &jupyterRefusal{response.StatusCode, route}
	}
	if into == nil {
		_, err = io.Copy(io.Discard, answer)
		return err
	}
	return json.NewDecoder(answer).Decode(into)
}

// kernel chooses the kernel for a language: by name, but for the generic one. byMessage
// says how it is interrupted.
func (j *Jupyter) kernel(ctx context.Context, language string) (chosen string, byMessage bool, err error) {
	var known struct {
		Kernelspecs map[string]struct {
			Spec struct {
				Language      string `json:"language"`
				InterruptMode string `json:"interrupt_mode"`
			} `json:"spec"`
		} `json:"kernelspecs"`
	}
	if err := j.call(ctx, http.MethodGet, "/api/kernelspecs", nil, &known); err != nil {
		return "", false, err
	}
	var names []string
	for name, item := range known.Kernelspecs {
		if strings.EqualFold(item.Spec.Language, language) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "", false, errNoKernel
	}
	sort.Slice(names, func(a, b int) bool {
		if generic := names[a] == "python3"; generic != (names[b] == "python3") {
			return !generic
		}
		return names[a] < names[b]
	})
	return names[0], known.Kernelspecs[names[0]].Spec.InterruptMode == "message", nil
}

// start makes a session whose kernel begins in a directory. While the server or
// the kernel is still being installed it is tried again.
func (j *Jupyter) start(ctx context.Context, language, directory string) (jupyterSession, error) {
	if j.base == nil {
		return jupyterSession{}, errNoJupyter
	}
	ctx, cancel := context.WithTimeout(ctx, jupyterStartup)
	defer cancel()
	for {
		name, byMessage, err := j.kernel(ctx, language)
		if err == nil {
			made, err := j.startKernel(ctx, name, directory)
			made.interruptedByMessage = byMessage
			return made, err
		}
		select {
		case <-ctx.Done():
			return jupyterSession{}, err
		case <-time.After(jupyterPause):
		}
	}
}

// startKernel is not interrupted by the end of ctx: the server would go on. The caller looks
// whether the session is still wanted.
func (j *Jupyter) startKernel(ctx context.Context, name, directory string) (jupyterSession, error) {
	file := httpx.UUID() + ".ipynb"
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), jupyterCall)
	defer cancel()
	var made jupyterSession
	err := j.call(limited, http.MethodPost, "/api/sessions", map[string]any{
		"path": path.Join(strings.TrimPrefix(directory, "/"), file), "name": file, "type": "notebook",
		"kernel": map[string]string{"name": name},
	}, &made)
	if err == nil && (made.ID == "" || made.Kernel.ID == "") {
		err = errors.New("jupyter made a session without an id")
	}
	if err == nil {
		return made, nil
	}
	if mayHaveBegun(err) {
		j.endLost(file)
	}
	return jupyterSession{}, err
}

// endSurely ends a session that nothing will look at again.
func (j *Jupyter) endSurely(session jupyterSession) {
	ctx, stop := context.WithTimeout(context.Background(), jupyterSearch)
	defer stop()
	for j.end(ctx, session.ID) != nil {
		select {
		case <-ctx.Done():
			return
		case <-time.After(jupyterPause):
		}
	}
}

// mayHaveBegun reports whether the server may have done what a failed call asked for.
func mayHaveBegun(err error) bool {
	var refusal *jupyterRefusal
	var network *net.OpError
	return !errors.As(err, &refusal) && (!errors.As(err, &network) || network.Op != "dial")
}

// endLost looks for the session with a file name and ends it.
func (j *Jupyter) endLost(file string) {
	ctx, stop := context.WithTimeout(context.Background(), jupyterSearch)
	defer stop()
	for {
		var all []jupyterSession
		if j.call(ctx, http.MethodGet, "/api/sessions", nil, &all) == nil {
			lost := slices.IndexFunc(all, func(s jupyterSession) bool { return path.Base(s.Path) == file })
			if lost >= 0 && j.end(ctx, all[lost].ID) == nil {
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(jupyterPause):
		}
	}
}

// end ends a session and its kernel; one that is not there has ended.
func (j *Jupyter) end(ctx context.Context, session string) error {
	return ended(j.call(ctx, http.MethodDelete, "/api/sessions/"+url.PathEscape(session), nil, nil))
}

func ended(err error) error {
	var refusal *jupyterRefusal
	if errors.As(err, &refusal) && refusal.status == http.StatusNotFound {
		return nil
	}
	return err
}

// endKernels ends every kernel of the server, and returns when there is none.
func (j *Jupyter) endKernels(ctx context.Context) error {
	if j.base == nil {
		return nil
	}
	for {
		var all []struct {
			ID string `json:"id"`
		}
		if err := j.call(ctx, http.MethodGet, "/api/kernels", nil, &all); err != nil || len(all) == 0 {
			return err
		}
		var ending sync.WaitGroup
		for _, kernel := range all {
			ending.Go(func() {
				_ = j.call(ctx, http.MethodDelete, "/api/kernels/"+url.PathEscape(kernel.ID), nil, nil) // looked at again
			})
		}
		ending.Wait()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(jupyterPause):
		}
	}
}

func (j *Jupyter) interrupt(ctx context.Context, kernel string) error {
	return j.call(ctx, http.MethodPost, "/api/kernels/"+url.PathEscape(kernel)+"/interrupt", nil, nil)
}

package server

// ANY /proxy/{port}/{path…}: passes a request to a service in the sandbox.
//
// Invariants
//   - The only destination is 127.0.0.1; redirects are passed on, not followed.
//   - The access token never reaches the service.
//   - Escaped path, query and Host reach the service unchanged. Upgrades and streams are passed on, except that a
//     request with a body is not upgraded. httpx/upload.go describes how bodies are passed on.

import (
	"errors"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"time"

	"sallyport.dev/execd/internal/httpx"
)

const proxyLimit = 256

// serveProxy serves a request; rest is the part of the raw path after "/proxy".
func (s *Server) serveProxy(w http.ResponseWriter, r *http.Request, rest string) {
	text, path, _ := strings.Cut(strings.TrimPrefix(rest, "/"), "/")
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || strconv.FormatUint(port, 10) != text || port == 0 { // so that the own port has one spelling
		httpx.WriteError(w, httpx.BadRequest("invalid or missing port"))
		return
	}
	if r.Method == http.MethodConnect {
		httpx.NotFound(w)
		return
	}
	raw := "/" + path
	decoded, err := url.PathUnescape(raw)
	if err != nil {
		httpx.WriteError(w, httpx.BadRequest("invalid path"))
		return
	}
	target := *r
	target.URL = &url.URL{
		Scheme: "http", Host: "127.0.0.1:" + strconv.FormatUint(port, 10),
		Path: decoded, RawPath: raw, RawQuery: r.URL.RawQuery, ForceQuery: r.URL.ForceQuery,
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // the service limits the time of a body
	s.proxy.ServeHTTP(w, &target)
}

// portProxy passes requests on to ports of the sandbox. The number of concurrent requests is bounded.
type portProxy struct {
	services *httpx.Carrier
	reverse  *httputil.ReverseProxy
	slots    chan struct{}
	log      func(string)
}

// newProxy makes a portProxy. It opens no connection.
func newProxy(logger func(string)) *portProxy {
	services := httpx.NewCarrier(&http.Transport{
		Proxy:                  nil,
		DialContext:            (&net.Dialer{Timeout: 30 * time.Second}).DialContext,
		DisableCompression:     true,
		MaxIdleConns:           64,
		MaxIdleConnsPerHost:    16,
		IdleConnTimeout:        90 * time.Second,
		MaxResponseHeaderBytes: httpx.AnswerHeadLimit,
	})
	return &portProxy{
		services: services, slots: make(chan struct{}, proxyLimit), log: logger,
		reverse: &httputil.ReverseProxy{
			Transport: services, FlushInterval: -1, Rewrite: rewriteForService, ErrorHandler: serviceFailed,
		},
	}
}

func (p *portProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
		p.services.Pass(p.reverse, w, r, r.Body)
	default:
		p.log("proxy: too many concurrent requests")
		w.Header().Set("Retry-After", "1")
		httpx.WriteError(w, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many concurrent proxy requests"))
	}
}

func rewriteForService(p *httputil.ProxyRequest) {
	// The reverse proxy removes query parameters that it cannot parse, and all X-Forwarded-* headers.
	p.Out.URL = p.In.URL
	p.Out.Host = p.In.Host
	p.Out.Header.Del(httpx.TokenHeader)
	forwarded := append([]string(nil), p.In.Header["X-Forwarded-For"]...)
	if host, _, err := net.SplitHostPort(p.In.RemoteAddr); err == nil {
		forwarded = append(forwarded, host)
	}
	p.Out.Header["X-Forwarded-For"] = []string{strings.Join(forwarded, ", ")}
	p.Out.Header["X-Forwarded-Proto"] = []string{"http"}
}

func serviceFailed(w http.ResponseWriter, _ *http.Request, err error) {
	if !errors.Is(err, httpx.ErrBrokenBody) {
		err = httpx.NewProblem(http.StatusBadGateway, httpx.CodeRuntime, "the service on this port did not answer")
	}
	httpx.WriteError(w, err)
}

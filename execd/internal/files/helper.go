package files

// The helper that serves file routes as another identity (identity.go).
//
// Invariants
//   - It accepts connections only from its control descriptor. When that closes, the
//     helper ends at once, with its active requests.
//   - It serves only after it has its identity; a failure to set the identity ends it.
//   - It reads no environment variables; relative paths start at /, ~ is its account's home.

import (
	"net/http"

	"sallyport.dev/execd/internal/account"
	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/helper"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/sys"
)

// HelperFlag is the whole command line of a helper.
const HelperFlag = "--file-helper"

// RunHelper serves until the control connection ends.
func RunHelper() int {
	var plan identityPlan
	control, err := helper.Begin(&plan)
	if control == nil {
		return 2
	}
	if err == nil && plan.Switch {
		err = sys.TakeIdentity(plan.UID, plan.GID, plan.Groups)
	}
	if !helper.Answer(control, err) {
		return 2
	}
	accounts := func() account.Accounts { return account.Load("") }
	files := New(environ.New(nil), accounts, "/", sys.CurrentUmask())
	_ = helper.Server(helperHandler(files)).Serve(helper.Listener{Control: control})
	return 0
}

func helperHandler(files *Files) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if handler := files.Route(r.Method, r.URL.Path); handler != nil {
			handler(w, r)
			return
		}
		httpx.NotFound(w)
	}
}

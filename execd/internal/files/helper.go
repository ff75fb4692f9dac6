package files

// The helper process that serves file routes as another identity (identity.go).
//
// Invariants
//   - It accepts connections only from its control descriptor. When that closes, the helper ends at once, with its
//     active requests.
//   - It serves only after it has its identity. If it cannot set the identity, it ends.
//   - It reads no environment variables. Relative paths start at /, and ~ is the home directory of its account.

import (
	"net/http"

	"sallyport.dev/execd/internal/account"
	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/helper"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/sys"
)

// HelperFlag is the only command line argument of a helper.
const HelperFlag = "--file-helper"

// RunHelper serves file routes until the control connection ends. It returns the exit status.
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

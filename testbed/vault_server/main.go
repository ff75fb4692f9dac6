// A HashiCorp Vault server for the tests: the published modules, built as one static program. Only the search for peers
// of a Raft cluster is replaced (discovery/).
//
// Vault starts plugins as programs of their own. With the name of a plugin as its only argument this program is that
// plugin: the accounts of PostgreSQL, and the login of Kubernetes.
package main

import (
	"fmt"
	"os"

	kubernetes "github.com/hashicorp/vault-plugin-auth-kubernetes"
	"github.com/hashicorp/vault/command"
	"github.com/hashicorp/vault/plugins/database/postgresql"
	"github.com/hashicorp/vault/sdk/database/dbplugin/v5"
	"github.com/hashicorp/vault/sdk/plugin"
)

func main() {
	if len(os.Args) == 2 {
		switch os.Args[1] {
		case "postgresql-database-plugin":
			dbplugin.ServeMultiplex(postgresql.New)
			return
		case "vault-plugin-auth-kubernetes":
			serve := &plugin.ServeOpts{BackendFactoryFunc: kubernetes.Factory}
			if err := plugin.ServeMultiplex(serve); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		}
	}
	os.Exit(command.Run(os.Args[1:]))
}

module github.com/hashicorp/go-gcp-common

go 1.24

require golang.org/x/oauth2 v0.31.0

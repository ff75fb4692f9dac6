module github.com/hashicorp/go-kms-wrapping/wrappers/azurekeyvault/v2

go 1.24

require github.com/hashicorp/go-kms-wrapping/v2 v2.0.18

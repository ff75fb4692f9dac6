package sys

const (
	sysRenameat2   = 276
	sysMemfdCreate = 279
)

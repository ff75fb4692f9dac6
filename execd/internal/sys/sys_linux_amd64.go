package sys

const (
	sysRenameat2   = 316
	sysMemfdCreate = 319
)

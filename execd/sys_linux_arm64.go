package main

const (
	sysRenameat2   = 276
	sysMemfdCreate = 279
)

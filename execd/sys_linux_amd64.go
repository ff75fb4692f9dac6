package main

const (
	sysRenameat2   = 316
	sysMemfdCreate = 319
)

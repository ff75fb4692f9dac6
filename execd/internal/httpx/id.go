package httpx

// Random identifiers.

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
)

// ID returns 128 random bits as 32 hexadecimal digits.
func ID() string {
	var raw [16]byte
	rand.Read(raw[:])
	return hex.EncodeToString(raw[:])
}

// UUID returns a random UUID as text.
func UUID() string {
	var raw [16]byte
	rand.Read(raw[:])
	raw[6], raw[8] = raw[6]&0x0f|0x40, raw[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", raw[:4], raw[4:6], raw[6:8], raw[8:10], raw[10:])
}

package terminal

import (
	"os"
	"testing"

	"sallyport.dev/execd/internal/testhost"
)

func TestMain(m *testing.M) { os.Exit(testhost.Main(m)) }

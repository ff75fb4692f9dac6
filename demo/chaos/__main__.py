"""`python -m demo.chaos`."""

import sys

from demo.chaos.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m frontdoor COMMAND ...`: the program that `./run` executes."""

import sys

from frontdoor.main import main

sys.exit(main(sys.argv[1:]))

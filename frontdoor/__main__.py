"""`python -m frontdoor COMMAND ...`: what `./run` becomes."""

import sys

from frontdoor.main import main

sys.exit(main(sys.argv[1:]))

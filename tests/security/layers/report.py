"""`python -m tests.security.layers.report`: runs the matrix and writes it into docs/threat-model.md.

It runs as root, with the environment variables that `run` sets for the system tests.
"""

import logging
from pathlib import Path

from tests.security.layers.defences import BEGIN, END
from tests.security.layers.matrix import document, running
from tests.stacks import INTERNET

DOCUMENT = Path(__file__).parents[3] / "docs" / "threat-model.md"


def main() -> None:
    logging.getLogger("opensandbox").setLevel(logging.CRITICAL)
    with running(INTERNET) as matrix:
        tables = document(matrix)
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()

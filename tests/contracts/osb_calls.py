"""Runs the osb command line once for each line on standard input, a JSON list: its arguments, then what it reads.

For the interpreter of osb's own environment. Answers each with a JSON list: exit code, standard output, standard error.
The program takes seconds to import; what a call does is what it does in a process of its own.
"""

import json
import sys

from click.testing import CliRunner
from opensandbox_cli.main import cli

for line in sys.stdin:
    *arguments, given = json.loads(line)
    done = CliRunner().invoke(cli, arguments, input=given)
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)

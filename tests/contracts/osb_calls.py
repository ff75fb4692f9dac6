"""A runner of the osb command line: it runs it once for each line on standard input.

A line is a JSON list: the arguments, then the standard input. The answer is a JSON list: exit code, standard output,
standard error. The interpreter is that of osb's own environment. The program takes seconds to import, so one process
serves all calls; each call behaves as in a process of its own.
"""

import json
import sys

from click.testing import CliRunner
from opensandbox_cli.main import cli

for line in sys.stdin:
    *arguments, given = json.loads(line)
    done = CliRunner().invoke(cli, arguments, input=given)
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)

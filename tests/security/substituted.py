"""A Sallyport server whose daemons are started from a module of the tests instead of the product's modules."""

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from testbed.stack import Stack

ROOT = Path(__file__).parents[2]


class SubstitutedStack(Stack):
    """A server as `sallyport serve` starts it, except that the module of each daemon is `module`."""

    slots_ahead = 0
    module: ClassVar[str]

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        self.config.write_text(self.settings)
        host = Path(self.sallyport("serve", "--write-only").splitlines()[-1])
        document = json.loads(host.read_text())
        for process in document["processes"]:
            process["module"] = self.module
        host.write_text(json.dumps(document))
        self.prepare()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(host)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def prepare(self) -> None:
        """Make the resources that the substitutes need. The run directory exists and no daemon runs."""

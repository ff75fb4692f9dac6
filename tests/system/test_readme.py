"""The README's first example works as it is written, but for the names of hosts, which are the demo internet's."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from demo.internet import API
from demo.stack import Stack

pytestmark = pytest.mark.system

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def _block(language: str, holding: str) -> str:
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if holding in block)


def test_the_first_example_installs_the_sdk_and_runs(stack: Stack, tmp_path: Path) -> None:
    """In an environment of its own, as Debian's Python wants it; the sandbox's request is answered as authenticated."""
    install, *_, start = _block("console", "OPEN_SANDBOX_DOMAIN").splitlines()
    assert "pip install" in install
    (tmp_path / "example.py").write_text(_block("python", "opensandbox").replace("api.example.com", API))
    kept = {name: value for name, value in os.environ.items() if name in ("PIP_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE")}
    done = subprocess.run(
        ["bash", "-ec", f"{install}\n{start}"],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "OPEN_SANDBOX_DOMAIN": f"127.0.0.1:{stack.port}",
            "OPEN_SANDBOX_API_KEY": stack.api_key,
            **kept,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert 0 == done.returncode, done.stderr
    assert "Denied" not in done.stdout
    assert done.stdout.strip(), done.stderr

"""The README's example works as written, except for the names of hosts, which are the test internet's."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from testbed.internet import API
from testbed.stack import Stack

pytestmark = pytest.mark.system

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def _block(language: str, holding: str) -> str:
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if holding in block)


def _shape(line: str) -> str:
    """Return a line of `audit tail` without the parts that differ in each run."""
    line = re.sub(r"^\S+Z", "TIME", line)
    return re.sub(r"sbx-[0-9a-f]{24}#\d+", "SANDBOX", line)


def test_the_example_installs_the_sdk_and_runs_to_a_denial_and_its_record(stack: Stack, tmp_path: Path) -> None:
    """In a virtual environment, as Debian's Python requires: one request is answered, one denied."""
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
    answered, _, denied = done.stdout.partition("Denied by policy")
    assert answered.strip(), done.stderr
    page = _block("text", "Denied by policy").replace("api.example.com", API)
    assert page.strip() == f"Denied by policy{denied}".strip()

    shown = _block("text", "DENY").replace("api.example.com", API).strip()
    begins, _, ends = _shape(shown).partition(" ... ")
    tail = [_shape(line) for line in stack.sallyport("audit", "tail", "--denied").splitlines()]
    assert [line for line in tail if line.startswith(begins) and line.endswith(ends)], tail

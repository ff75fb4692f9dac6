"""Debian packages: missing ones are listed, then installed."""

import shutil
import subprocess
from pathlib import Path

from frontdoor.steps import say, step

PACKAGES = tuple(Path(__file__).with_name("packages.txt").read_text().split())
TEST_PACKAGES = ("gcc", "libc6-dev")
"""The race detector of Go is a C library."""
BENCH_PACKAGES = ("nghttp2-client", "wrk")
"""The clients of the benchmarks. `builds` only unpacks nginx and Squid: their installation would start them."""
SQUID = ("squid-openssl", "squid-common", "squid-langpack", "libecap3", "libltdl7", "libtdb1")


def install(names: tuple[str, ...]) -> None:
    """Install the packages that are missing. Any dockerd on the PATH counts as `docker.io`."""
    missing = [name for name in names if not _installed(name)]
    if missing:
        say(f"about to install Debian packages: {' '.join(missing)}")
        step("apt-get update", "apt-get", "update", "-q")
        options = ("-q", "-y", "--no-install-recommends")
        step("apt-get install", "apt-get", "install", *options, *missing, DEBIAN_FRONTEND="noninteractive")


def _installed(name: str) -> bool:
    if name == "docker.io" and shutil.which("dockerd"):
        return True
    query = ("dpkg-query", "-W", "-f", "${db:Status-Status}", name)
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout == "installed"

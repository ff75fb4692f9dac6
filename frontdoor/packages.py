"""Debian packages: missing ones are listed, then installed."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from frontdoor.steps import say, step

PACKAGES = tuple(Path(__file__).with_name("packages.txt").read_text().split())
POSTGRESQL = "postgresql-15"
TEST_PACKAGES = ("gcc", "libc6-dev", POSTGRESQL, "redis-tools", "softhsm2")
"""The race detector of Go is a C library. Tests start a PostgreSQL and a Redis of their own; SoftHSM keeps keys."""
REGISTRY = "docker-registry"
"""The tests' registry of images. `builds` only unpacks it: its installation would start it."""
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
        with _no_cluster() if POSTGRESQL in missing else contextlib.nullcontext():
            step("apt-get install", "apt-get", "install", *options, *missing, DEBIAN_FRONTEND="noninteractive")


@contextlib.contextmanager
def _no_cluster(directory: Path = Path("/etc/postgresql-common/createcluster.d")) -> Iterator[None]:
    """Keep the installation of PostgreSQL from making and starting a server on this host."""
    drop_in = directory / "sallyport.conf"
    directory.mkdir(parents=True, exist_ok=True)
    drop_in.write_text("create_main_cluster = false\n")
    try:
        yield
    finally:
        drop_in.unlink(missing_ok=True)


def _installed(name: str) -> bool:
    if name == "docker.io" and shutil.which("dockerd"):
        return True
    query = ("dpkg-query", "-W", "-f", "${db:Status-Status}", name)
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout == "installed"

"""Builds in the cache are not repeated. Their paths reach the other processes (frontdoor/builds.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontdoor import names, packages

ROOT = Path(__file__).resolve().parents[2]
STORAGE = "versitygw-v1.8.0"
RUNSC = "runsc-v0.0.0-20260905035102-160fafc42237"
PROGRAM = """
import json, os
from frontdoor import builds, packages, places
packages.PACKAGES = packages.TEST_PACKAGES = packages.BENCH_PACKAGES = ()
here = places.enter(os.environ)
built = builds.set_up(here)
builds.for_tests(here, built, every=EVERY)
builds.for_bench(here)
print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("SALLYPORT_")}))
"""


def run(home: Path, *, every: bool = True) -> subprocess.CompletedProcess[str]:
    """Run as root with this home, without `go` and the builders of images on the path."""
    tools = home / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("tar", "env"):
        if not (tools / name).exists():
            (tools / name).symlink_to(f"/usr/bin/{name}")
    environment = {"SALLYPORT_HOME": str(home), "SALLYPORT_RUN_DIR": "/r", "RUN_UV": "/no/uv", "PATH": str(tools)}
    program = PROGRAM.replace("places.enter(os.environ)", "places.find(os.environ, os.getcwd(), 0)")
    program = program.replace("EVERY", str(every))
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(name="home")
def _home(tmp_path: Path) -> Path:
    """Make a home with a complete cache."""
    cache = tmp_path / "cache"
    cache.mkdir()
    images = [names.image(ROOT, name) for name in ("base", "small", "java")]
    for name in (names.execd(ROOT), names.code_image(ROOT), names.vault_server(ROOT), *images, RUNSC, STORAGE):
        (cache / name).touch(mode=0o755)
    (cache / names.clients(ROOT)).mkdir()
    (cache / names.clients(ROOT) / "complete").touch()
    for package in ("nginx", packages.SQUID[0], packages.REGISTRY):
        (cache / package).mkdir()
        (cache / package / "complete").touch()
    return tmp_path


def test_what_is_in_the_cache_is_exported_and_not_built(home: Path) -> None:
    done = run(home)
    assert (0, "") == (done.returncode, done.stderr)
    cache = f"{home}/cache"
    assert {
        "SALLYPORT_HOME": str(home),
        "SALLYPORT_RUN_DIR": "/r",
        "SALLYPORT_RUNSC": f"{cache}/{RUNSC}",
        "SALLYPORT_NGINX": f"{cache}/nginx/usr/sbin/nginx",
        "SALLYPORT_SQUID": f"{cache}/{packages.SQUID[0]}",
        "SALLYPORT_EXECD": f"{cache}/{names.execd(ROOT)}",
        "SALLYPORT_BASE_IMAGE": f"{cache}/{names.image(ROOT, 'base')}",
        "SALLYPORT_EMPTY_IMAGE": f"{cache}/empty.tar",
        "SALLYPORT_CODE_IMAGE": f"{cache}/{names.code_image(ROOT)}",
        "SALLYPORT_SMALL_IMAGE": f"{cache}/{names.image(ROOT, 'small')}",
        "SALLYPORT_JAVA_IMAGE": f"{cache}/{names.image(ROOT, 'java')}",
        "SALLYPORT_CLIENTS": f"{cache}/{names.clients(ROOT)}",
        "SALLYPORT_VAULT": f"{cache}/{names.vault_server(ROOT)}",
        "SALLYPORT_REGISTRY": f"{cache}/docker-registry/usr/bin/docker-registry",
        "SALLYPORT_STORAGE": f"{cache}/{STORAGE}",
    } == json.loads(done.stdout)


def test_what_only_every_test_needs_is_not_built_for_the_others(home: Path) -> None:
    os.remove(home / "cache" / names.image(ROOT, "java"))
    done = run(home, every=False)
    assert (0, "") == (done.returncode, done.stderr)
    assert "SALLYPORT_JAVA_IMAGE" not in json.loads(done.stdout)
    assert "image with Debian's Java" in run(home).stderr


@pytest.mark.parametrize(
    "title", ["execd", "base image", "code-interpreter image", "small image", "HashiCorp Vault", "published clients"]
)
def test_what_is_missing_is_built(home: Path, title: str) -> None:
    """The build fails here, and the message names it."""
    missing = {
        "execd": names.execd(ROOT),
        "base image": names.image(ROOT, "base"),
        "code-interpreter image": names.code_image(ROOT),
        "small image": names.image(ROOT, "small"),
        "HashiCorp Vault": names.vault_server(ROOT),
        "published clients": f"{names.clients(ROOT)}/complete",
    }
    os.remove(home / "cache" / missing[title])
    done = run(home)
    assert (1, True) == (done.returncode, f"run: {title}" in done.stderr), done.stderr

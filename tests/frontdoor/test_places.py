"""Places are derived from the variables and the user. Two homes never share the names of their namespaces."""

import os
import subprocess

import pytest

from frontdoor.places import checksum, enter, find, internet_prefix


def test_places_follow_the_variables() -> None:
    places = find({}, "/checkout", 0)
    assert ("/var/lib/sallyport", "/var/lib/sallyport/cache", "/run/sallyport", "spdemo") == (
        places.home,
        places.cache,
        places.run_dir,
        places.internet,
    )
    assert "/checkout/.venv/bin/python" == places.python
    sessions = ("faults", "images", "security")
    assert ("/run/sallyport", *(f"/run/sallyport-{name}" for name in sessions)) == places.run_dirs
    assert ("/var/lib/sallyport", *(f"/var/lib/sallyport/{name}" for name in sessions)) == places.homes
    assert {"spdemo-f", "spdemo-i", "spdemo-s"} == {session.internet for session in places.sessions.values()}
    assert {places.cache} == {session.cache for session in places.sessions.values()}
    places = find({"SALLYPORT_HOME": "/h", "SALLYPORT_RUN_DIR": "/r", "SALLYPORT_TEST_INTERNET": "x"}, "/c", 0)
    assert ("/h", "/h/cache", "/r", "x") == (places.home, places.cache, places.run_dir, places.internet)


def test_the_cache_of_other_users_is_their_own() -> None:
    assert "/home/a/.cache/sallyport" == find({"HOME": "/home/a"}, "/c", 1000).cache
    assert "/x/sallyport" == find({"HOME": "/home/a", "XDG_CACHE_HOME": "/x"}, "/c", 1000).cache


@pytest.mark.parametrize("text", ["", "a", "/var/lib/sp-d", "/tmp/" + "long/" * 80, "ü\n"])
def test_checksums_are_those_of_cksum(text: str) -> None:
    done = subprocess.run(["cksum"], input=text.encode(), capture_output=True, check=True)
    assert int(done.stdout.split()[0]) == checksum(text.encode())


def test_the_prefix_of_namespaces_is_the_homes() -> None:
    assert "spdemo" == internet_prefix("/var/lib/sallyport")
    assert len({internet_prefix(home) for home in ("/var/lib/sallyport", "/a", "/b")}) == 3


def test_processes_get_our_variables_and_not_the_bootstraps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RUN_CALLER": "/there", "RUN_UV": "/bin/uv", "SALLYPORT_HOME": "/h"}.items():
        monkeypatch.setenv(name, value)
    caches = ("UV_CACHE_DIR", "GOCACHE", "GOMODCACHE", "MYPY_CACHE_DIR", "RUFF_CACHE_DIR", "STATICCHECK_CACHE")
    for name in (*caches, "UV_PYTHON_INSTALL_DIR", "SALLYPORT_TEST_INTERNET"):
        monkeypatch.setenv(name, "of the caller")
    places = enter(os.environ)
    assert ("/there", "/bin/uv") == (places.caller, places.uv)
    assert not {"RUN_CALLER", "RUN_UV"} & os.environ.keys()
    assert all(os.environ[name].startswith(f"{places.cache}/") for name in caches)
    assert "of the caller" == os.environ["SALLYPORT_TEST_INTERNET"]

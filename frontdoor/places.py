"""The paths of everything that `./run` makes, and the variables that it exports to its child processes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

DEFAULT_HOME = "/var/lib/sallyport"
_DEFAULT_RUN = "/run/sallyport"
_POLYNOMIAL = 0x04C11DB7
_GO_FLAGS = "-trimpath -gcflags=all=-dwarf=false"
"""Go's cache serves checkouts at every path. No program keeps symbols for a debugger, so none are generated."""


@dataclass(frozen=True)
class Places:
    """The directories of one `./run`: the checkout, the home, the cache, the run directory."""

    checkout: str
    home: str
    cache: str
    run_dir: str
    internet: str
    """The prefix of the names of the namespaces that the demo makes; another home has another prefix."""
    caller: str
    """The directory in which `./run` was called: the user can give paths relative to it."""
    uv: str

    @property
    def sessions(self) -> dict[str, "Places"]:
        """The places of each session of tests that runs beside the first one, by the name of its lane."""
        return {
            name: replace(
                self,
                home=f"{self.home}/{name}",
                run_dir=f"{self.run_dir}-{name}",
                internet=f"{self.internet}-{name[0]}",
            )
            for name in ("faults", "images", "security")
        }

    @property
    def homes(self) -> tuple[str, ...]:
        """The home, and those of the sessions."""
        return (self.home, *(session.home for session in self.sessions.values()))

    @property
    def run_dirs(self) -> tuple[str, ...]:
        """The run directory, and those of the sessions."""
        return (self.run_dir, *(session.run_dir for session in self.sessions.values()))

    @property
    def python(self) -> str:
        """The Python of the checkout's environment."""
        return f"{self.checkout}/.venv/bin/python"

    @property
    def built(self) -> str:
        """The settings file with the paths of the built parts."""
        return f"{self.home}/built.toml"

    @property
    def exported(self) -> dict[str, str]:
        """The variables of every child process. Tools keep their files below the home, where `clean` removes them."""
        return {
            "SALLYPORT_TEST_INTERNET": self.internet,
            "UV_CACHE_DIR": f"{self.cache}/uv-cache",
            "UV_PYTHON_INSTALL_DIR": f"{self.cache}/python",
            "GOCACHE": f"{self.cache}/go-build",
            "GOFLAGS": _GO_FLAGS,
            "GOMODCACHE": f"{self.cache}/go-mod",
            "MYPY_CACHE_DIR": f"{self.cache}/mypy",
            "RUFF_CACHE_DIR": f"{self.cache}/ruff",
            "STATICCHECK_CACHE": f"{self.cache}/staticcheck",
        }


def find(environment: Mapping[str, str], checkout: str, user: int) -> Places:
    """Return the places for `user` (numeric) with these variables; an empty variable counts as none."""
    home = environment.get("SALLYPORT_HOME") or DEFAULT_HOME
    own = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '')}/.cache"
    cache = f"{home}/cache" if user == 0 else f"{own}/sallyport"
    return Places(
        checkout=checkout,
        home=home,
        cache=cache,
        run_dir=environment.get("SALLYPORT_RUN_DIR") or _DEFAULT_RUN,
        internet=environment.get("SALLYPORT_TEST_INTERNET") or internet_prefix(home),
        caller=environment.get("RUN_CALLER") or checkout,
        uv=environment.get("RUN_UV") or "uv",
    )


def enter(environment: "os._Environ[str]") -> Places:
    """Return this process's places. Replace the bootstrap's variables in its environment by those of the places."""
    places = find(environment, os.getcwd(), os.getuid())
    for name in ("RUN_CALLER", "RUN_UV"):
        environment.pop(name, None)
    environment.update(places.exported)
    return places


def internet_prefix(home: str) -> str:
    """Return the prefix of the names of a home's namespaces."""
    return "spdemo" if home == DEFAULT_HOME else f"sp{checksum(home.encode())}"


def checksum(data: bytes) -> int:
    """Return the checksum that `cksum` prints.

    Source: POSIX, cksum.
    """
    length = len(data)
    counted = data + length.to_bytes((length.bit_length() + 7) // 8, "little")
    value = 0
    for byte in counted:
        value ^= byte << 24
        for _ in range(8):
            value = (value << 1 ^ (_POLYNOMIAL if value & 0x80000000 else 0)) & 0xFFFFFFFF
    return value ^ 0xFFFFFFFF

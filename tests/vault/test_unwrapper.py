"""The process of `vault/wrapping/unwrapper.py`, and its parent's side, with a module that observes and misbehaves."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vault.tokens import PIN, SoftToken
from vault import vaultd
from vault.config import VaultConfig
from vault.keyring import MasterKeyError
from vault.wrapping import asking
from vault.wrapping.asking import Wrapping
from vault.wrapping.sources import KeySource, Pkcs11Token, WrappedKey, WrappingConfig, WrappingError

WRAPPED = WrappedKey(1, "pkcs11", "0f" * 16, "AAAA")
_PARENT = """
import sys
from pathlib import Path
from vault.wrapping.asking import Wrapping
from vault.wrapping.sources import KeySource, Pkcs11Token, WrappingConfig
module, observed, pin = sys.argv[1:]
token = Pkcs11Token(module, "t", "k", pin, {"OBSERVED": observed, "MODE": "hang"})
Wrapping(WrappingConfig(KeySource.PKCS11, token), Path(observed), {KeySource.PKCS11: -1}).wrap()
"""


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("module") / "observer.so"
    source = Path(__file__).with_name("observer.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(path), str(source)], check=True)
    return path


class Observed:
    """An unwrapper that loads the module; `directory` has what the module has seen."""

    def __init__(self, directory: Path, module: Path) -> None:
        self.directory, self._module = directory, module
        self.token = SoftToken(directory / "token")
        self._pin = os.open(self.token.pin_file, os.O_RDONLY)

    def wrapping(self, mode: str = "") -> Wrapping:
        environment = {"OBSERVED": str(self.directory), "MODE": mode}
        place = Pkcs11Token(str(self._module), "t", "k", str(self.token.pin_file), environment)
        config = WrappingConfig(KeySource.PKCS11, place)
        return Wrapping(config, self.directory, {KeySource.PKCS11: self._pin})

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()

    def ready(self) -> int:
        """Wait for the module, and return the process that has loaded it."""
        deadline = time.monotonic() + 20
        while not (self.directory / "ready").exists() or not self.read("ready"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int(self.read("ready").split()[0])

    def close(self) -> None:
        os.close(self._pin)


@pytest.fixture
def observed(tmp_path: Path, module: Path) -> Iterator[Observed]:
    made = Observed(tmp_path, module)
    yield made
    made.close()


def test_a_module_is_loaded_into_a_hardened_process_with_nothing_of_its_parent(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No core, no dump, no new privileges, bounds; no PIN and no variable of the parent; locked memory if allowed."""
    monkeypatch.setenv("SALLYPORT_CANARY", "canary-1c0d")
    with pytest.raises(WrappingError, match="no usable PKCS#11 module"):
        observed.wrapping().unwrap([WRAPPED])
    limits = {line[:26].strip(): line[26:].split()[:2] for line in observed.read("limits").splitlines()[1:]}
    assert ["0", "0"] == limits["Max core file size"]
    assert ["256", "256"] == limits["Max open files"]
    assert str(2 << 30) == limits["Max address space"][0]
    status = dict(line.split(":\t", 1) for line in observed.read("status").splitlines())
    assert "1" == status["NoNewPrivs"]
    assert "0" == observed.read("ready").split()[1]  # dumpable
    if os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        assert int(status["VmLck"].split()[0]) > int(status["VmRSS"].split()[0]) // 2
    environment = {each.partition("=")[0] for each in observed.read("environ").split("\0") if each}
    assert environment <= {"PATH", "LANG", "OBSERVED", "MODE"}
    assert PIN not in observed.read("environ") + observed.read("cmdline")


def test_what_a_module_prints_is_no_answer(observed: Observed) -> None:
    """The module prints the form of an answer without a problem."""
    with pytest.raises(WrappingError, match="no usable PKCS#11 module"):
        observed.wrapping().wrap()


def test_a_module_that_crashes_gives_no_key(observed: Observed) -> None:
    with pytest.raises(WrappingError, match=r"ended without an answer \(status -6\)"):
        observed.wrapping("abort").wrap()


@pytest.mark.slow
def test_a_module_that_hangs_is_ended(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "SECONDS", 2.0)
    with pytest.raises(WrappingError, match="no answer within 2 s"):
        observed.wrapping("hang").wrap()
    with pytest.raises(ProcessLookupError):
        os.kill(observed.ready(), 0)


@pytest.mark.slow
async def test_vaultd_goes_on_while_a_key_is_opened(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to change the key waits in a thread; the event loop does not."""
    monkeypatch.setattr(asking, "SECONDS", 3.0)
    wrapping = observed.wrapping("hang")
    key = observed.directory / "key"
    key.touch(0o600)
    key.write_bytes(WRAPPED.text)
    config = VaultConfig(observed.directory, frozenset({0}), key, wrapping.config)
    waiting = asyncio.create_task(vaultd.successor(config, wrapping.credentials))
    ticks = 0
    while not waiting.done():
        await asyncio.sleep(0.02)
        ticks += 1
    assert ticks > 50
    with pytest.raises(MasterKeyError, match="no answer within 3 s"):
        await waiting


def test_it_ends_with_its_parent(observed: Observed, module: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(module), str(observed.directory), str(observed.token.pin_file)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as parent:
        child = observed.ready()
        os.kill(child, 0)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while True:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_source_without_settings_is_refused() -> None:
    with pytest.raises(WrappingError, match=r"no sallyport\.vault\.pkcs11"):
        Wrapping(WrappingConfig(), Path("/nonexistent")).unwrap([WRAPPED])
    with pytest.raises(WrappingError, match="no sallyport"):
        Wrapping(WrappingConfig(), Path("/nonexistent")).wrap()

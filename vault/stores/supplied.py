"""The backends `env://` and `file://`: values that hostd opens for the fetcher.

The fetcher's user can read neither hostd's environment nor the files of systemd's credentials. hostd opens one variable
or file that the settings permit (`runtimes/supplies.py`) and passes the descriptor. It does not read the value itself.

- A value is read again after `refresh` seconds, so a file that is replaced is in force by then.
- One line break at the end of a file is not part of the value.
"""

from typing import Protocol

from policy.references import BackendKind, SecretReference
from vault.stores.backend import BackendValue, NoValueError, unleased
from wire.api.fetcher import Fault, Material

_MATERIAL = {BackendKind.ENV: Material.ENVIRONMENT, BackendKind.FILE: Material.FILE}


class Supplier(Protocol):
    """Reads what hostd opens."""

    async def text(self, material: Material, name: str = "") -> str:
        """Return the content of one variable or file. Raises NoValueError."""
        ...


class SuppliedBackend:
    """`env://` or `file://`; see `vault.stores.backend.Backend`."""

    def __init__(self, kind: BackendKind, supplier: Supplier, refresh: int, about: str) -> None:
        self._material = _MATERIAL[kind]
        self._supplier = supplier
        self._refresh = refresh
        self.about = about

    async def read(self, reference: SecretReference, sandbox: str) -> BackendValue:
        """See `Backend`."""
        text = await self._supplier.text(self._material, reference.path)
        if self._material is Material.FILE:
            text = without_newline(text)
        return unleased(text, self._refresh)

    async def probe(self, reference: SecretReference) -> None:
        """See `Backend`."""
        await self.read(reference, "")

    async def release(self, reference: SecretReference, sandbox: str) -> None:
        """See `Backend`."""

    async def examine(self) -> None:
        """See `Backend`."""

    async def close(self) -> None:
        """See `Backend`."""


def without_newline(text: str) -> str:
    """Return a text without one line break at its end, which editors and commands add."""
    return text.removesuffix("\n").removesuffix("\r")


def decoded(content: bytes, most: int) -> str:
    """Return the text of a value.

    Raises:
        NoValueError: it is too long, or no text.
    """
    if len(content) > most:
        raise NoValueError(Fault.UNFIT, f"the value is over {most} bytes: store another one")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise NoValueError(Fault.UNFIT, "the value is not UTF-8 text: store another one") from None

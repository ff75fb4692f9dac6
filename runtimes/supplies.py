"""Opens for the fetcher what its user cannot read: variables of hostd's environment, and files of the operator.

It also opens the files that vaultd needs for the master key (`opened`).

- Only what the settings name is opened: variables by name, files below listed directories, and the file with
  the credential for HashiCorp Vault.
- The kernel resolves the name of a file below its directory (openat2, RESOLVE_BENEATH). A link that stays below is
  followed, because Kubernetes' mounts have such links; one that leaves is refused.
- hostd passes a descriptor of a regular file that is open for reading. It does not read a file.
- The variables are taken out of hostd's environment: Docker, gVisor and all other programs that hostd starts would
  inherit them.
"""

import ctypes
import errno
import logging
import os
import re
import stat
import struct
from collections.abc import Mapping
from typing import Final

import wire
from runtimes.spec import SuppliesConfig
from wire.api.fetcher import Material, Open, Supply

_OPENAT2: Final = 437
_BENEATH, _NO_MAGICLINKS = 0x08, 0x02
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


class Supplies:
    """Answers the fetcher's requests.

    Attributes:
        variables: those of this process's environment that the settings name. The environment has them no more.
    """

    def __init__(self, config: SuppliesConfig) -> None:
        self._config = config
        taken = {name: os.environb.pop(name.encode("ascii"), None) for name in config.environment}
        self.variables = {name: value for name, value in taken.items() if value is not None}

    async def answer(self, client: wire.Client, request: Open, fds: list[int]) -> None:
        """Open what is requested and pass its descriptor with the request's ticket.

        Raises:
            wire.RequestError: `path_missing`, `path_forbidden`, `path_kind`, `path`.
        """
        wire.frames.close_all(fds)
        fd = self.open(request.material, request.name)
        try:
            await client.ask(Supply(request.ticket), fds=[fd])
        finally:
            os.close(fd)

    def open(self, material: Material, name: str) -> int:
        """Return a descriptor, which the caller closes. Raises as `answer`."""
        try:
            match material:
                case Material.ENVIRONMENT:
                    return self._variable(name)
                case Material.FILE:
                    return self._file(name)
                case Material.CREDENTIAL:
                    return _plain(self._config.credential)
        except FileNotFoundError:
            raise wire.RequestError(wire.Code.PATH_MISSING, "there is no such variable or file") from None
        except OSError as error:
            raise wire.RequestError(wire.Code.PATH, f"it cannot be opened: {error.strerror}") from None

    def _variable(self, name: str) -> int:
        if name not in self._config.environment:
            raise wire.RequestError(wire.Code.PATH_FORBIDDEN, "the settings do not name this variable")
        if name not in self.variables:
            raise FileNotFoundError
        fd = os.memfd_create("variable", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(self.variables[name])
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def _file(self, name: str) -> int:
        """Open a file in the first listed directory that has it."""
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise wire.RequestError(wire.Code.PATH_FORBIDDEN, "not the name of a file")
        for directory in self._config.directories:
            try:
                top = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                return _regular(_beneath(top, name))
            except FileNotFoundError:
                continue
            finally:
                os.close(top)
        raise FileNotFoundError


def opened(files: Mapping[str, str]) -> dict[str, int]:
    """Open those of the files that are there, for a daemon that cannot; the caller closes the descriptors.

    A daemon without a file that it needs says so itself.
    """
    found: dict[str, int] = {}
    for name, path in files.items():
        try:
            found[name] = _plain(path)
        except FileNotFoundError:
            continue
        except (OSError, wire.RequestError) as error:
            _log.error("%s cannot be opened: %s", path, error)
    return found


def _plain(path: str | None) -> int:
    if path is None:
        raise FileNotFoundError
    return _regular(os.open(path, _FLAGS))


def _beneath(top: int, name: str) -> int:
    how = struct.pack("3Q", _FLAGS, 0, _BENEATH | _NO_MAGICLINKS)
    fd = int(_libc.syscall(_OPENAT2, top, name.encode("ascii"), how, ctypes.c_size_t(len(how))))
    if fd >= 0:
        return fd
    number = ctypes.get_errno()
    if number in (errno.EXDEV, errno.ELOOP):
        raise wire.RequestError(wire.Code.PATH_FORBIDDEN, "a link leads out of the directory")
    raise OSError(number, os.strerror(number))


def _regular(fd: int) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise wire.RequestError(wire.Code.PATH_FORBIDDEN, "it is no regular file")
    return fd

"""The default store: one sealed file per secret (`vault.stores.directory`).

- Metadata is read once, when the store is opened. Values are read at each release and not cached.
- A damaged record is listed by name and refused. It can only be deleted. Other records are not affected.

Only one process may use the store: vaultd holds a lock on the parent directory.
"""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

from vault.grants import SecretBinding
from vault.head import StoreHead
from vault.keyring import Keyring
from vault.secret import Secret
from vault.stores.directory import SealedDirectory, SealedRecordError
from vault.stores.port import (
    Clock,
    DamagedSecretError,
    Former,
    SecretInfo,
    UnknownSecretError,
    new_info,
    rotated_info,
    still_former,
    with_former,
)

_log = logging.getLogger(__name__)

_FORMAT = 2  # the body is JSON; in records without this key it is only the value


class FileStore:
    """Secrets in a directory of sealed files."""

    def __init__(
        self,
        path: Path,
        keyring: Keyring,
        clock: Clock = lambda: datetime.now(UTC),
        head: StoreHead | None = None,
        *,
        adopt: bool = False,
    ) -> None:
        """Open the store, or create its directory. See `SealedDirectory` for `head`, `adopt` and exceptions."""
        self.directory = SealedDirectory(path, keyring, "secrets", head, adopt=adopt)
        self._clock = clock
        self._infos: dict[str, SecretInfo | None] = {}
        for name in self.directory.names():
            try:
                self._infos[name] = _info(name, self.directory.read_metadata(name))
            except (SealedRecordError, DamagedSecretError) as error:
                _log.error("the record of secret %s cannot be used, delete the secret: %s", name, error)
                self._infos[name] = None

    @property
    def damaged(self) -> list[str]:
        """The names of records that do not open."""
        return sorted(name for name, info in self._infos.items() if info is None)

    def close(self) -> None:
        """Close the directory's descriptor."""
        self.directory.close()

    def put(self, name: str, value: Secret, binding: SecretBinding) -> SecretInfo:
        """See `Store`."""
        info = new_info(name, value, binding, self._clock(), self._infos)
        self._write(info, value)
        return info

    def rotate(self, name: str, value: Secret) -> SecretInfo:
        """See `Store`."""
        now = self._clock()
        info = rotated_info(self.info(name), value, now)
        try:
            current, former = self._read(name)
            kept = with_former(former, current, now)
        except DamagedSecretError:
            kept = ()
        self._write(info, value, kept)
        return info

    def delete(self, name: str) -> None:
        """See `Store`."""
        if name not in self._infos:
            raise UnknownSecretError("no secret has this name")
        self.directory.remove(name)
        del self._infos[name]

    def info(self, name: str) -> SecretInfo:
        """See `Store`."""
        if name not in self._infos:
            raise UnknownSecretError("no secret has this name")
        info = self._infos[name]
        if info is None:
            raise DamagedSecretError("the secret's record is damaged")
        return info

    def list_infos(self) -> list[SecretInfo]:
        """See `Store`."""
        return [info for _, info in sorted(self._infos.items()) if info is not None]

    def value(self, name: str) -> Secret:
        """See `Store`."""
        return self._read(name)[0]

    def former(self, name: str) -> tuple[Secret, ...]:
        """See `Store`."""
        return still_former(self._read(name)[1], self._clock())

    def _read(self, name: str) -> tuple[Secret, tuple[Former, ...]]:
        info = self.info(name)
        try:
            metadata, body = self.directory.read(name)
        except (SealedRecordError, FileNotFoundError) as error:
            raise DamagedSecretError(f"the secret's record is damaged: {error}") from None
        if _info(name, metadata) != info:
            raise DamagedSecretError("the secret's record is an older copy, or was changed")
        if "format" not in json.loads(metadata):
            return Secret(body.decode("utf-8")), ()
        try:
            document = json.loads(body)
            return Secret(document["value"]), tuple(Former.from_json(one) for one in document["former"])
        except (ValueError, KeyError, TypeError):
            raise DamagedSecretError("the secret's record cannot be read") from None

    def _write(self, info: SecretInfo, value: Secret, former: tuple[Former, ...] = ()) -> None:
        metadata = json.dumps({**info.to_json(), "format": _FORMAT}, sort_keys=True).encode()
        body = json.dumps({"value": value.reveal(), "former": [one.to_json() for one in former]})
        self.directory.write(info.name, metadata, body.encode("utf-8"))
        self._infos[info.name] = info


def _info(name: str, metadata: bytes) -> SecretInfo:
    try:
        info = SecretInfo.from_json(json.loads(metadata))
    except (ValueError, KeyError, TypeError):
        raise DamagedSecretError("the secret's metadata cannot be read") from None
    if info.name != name:
        raise DamagedSecretError("the secret's metadata belongs to another secret")
    return info

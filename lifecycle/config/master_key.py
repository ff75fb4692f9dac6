"""The master key in the settings: where it is kept, how its wrapped form is opened, and which files that needs.

Commands of root use the same sources as vaultd: `init`, `rekey` and `doctor` start the unwrapper as vaultd's user.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lifecycle.config.settings import Settings, SettingsError
from vault.keyring import CREDENTIAL, KEY_FD, NEXT_KEY_FD, create, load, source_of, try_out
from vault.stores.hvac.config import Auth, HashicorpServer
from vault.wrapping.asking import Wrapping
from vault.wrapping.sources import DESCRIPTORS, WRAPPING, KeySource, Pkcs11Token, TransitKey, WrappingConfig
from wire.frames import close_all

_CREDENTIALS = "CREDENTIALS_DIRECTORY"


def wrapping(settings: Settings) -> WrappingConfig:
    """Return the sources of wrapped keys.

    Raises:
        SettingsError: a key is missing that a source needs.
    """
    found = WrappingConfig(KeySource(settings.get("sallyport.vault.key_source")), _token(settings), _transit(settings))
    if found.source in WRAPPING and not found.has(found.source):
        first = {KeySource.PKCS11: "module", KeySource.TRANSIT: "address"}[found.source]
        raise SettingsError(f"sallyport.vault.{found.source}.{first} is missing: sallyport.vault.key_source needs it")
    return found


def files(settings: Settings) -> dict[str, Path]:
    """Return the files that root opens for vaultd, by the variables with their descriptors."""
    found = {DESCRIPTORS[source]: path for source, path in _credential_files(settings).items()}
    if is_credential(settings) and (directory := os.environ.get(_CREDENTIALS, "")).startswith("/"):
        found |= {KEY_FD: Path(directory, CREDENTIAL), NEXT_KEY_FD: Path(directory, f"{CREDENTIAL}-next")}
    return found


def is_credential(settings: Settings) -> bool:
    """Return whether the key is a credential of systemd."""
    return KeySource(settings.get("sallyport.vault.key_source")) is KeySource.CREDENTIAL


def prepare(settings: Settings) -> None:
    """Make the master key if there is none.

    Raises:
        SettingsError: the source is a credential, and systemd has given none.
        MasterKeyError: the key cannot be made.
        OSError: a directory cannot be made.
    """
    if is_credential(settings):
        if KEY_FD not in (given := files(settings)) or not given[KEY_FD].exists():
            raise SettingsError(
                "sallyport.vault.key_source is credential, and there is no such credential: start the server as a unit "
                f"of systemd with LoadCredential={CREDENTIAL}:FILE"
            )
        return
    if os.path.lexists(settings.master_key_file):
        return
    make_directories(settings)
    user = own_user(settings)
    with wrapping_of(settings) as wraps:
        create(settings.master_key_file, None if user is None else (user, user), wraps)


def make_directories(settings: Settings) -> None:
    """Make the directories of the key and of the vault, for vaultd's user. Raises OSError."""
    user = own_user(settings)
    for directory in dict.fromkeys((settings.state_dir / "vault", settings.master_key_file.parent)):
        if not directory.exists():
            directory.mkdir(mode=0o700, parents=True)
            if user is not None:
                os.chown(directory, user, user)


@contextlib.contextmanager
def wrapping_of(settings: Settings) -> Iterator[Wrapping]:
    """Return the sources with their credentials, which are open in the block. The unwrapper becomes vaultd's user."""
    with credentials(settings) as opened:
        yield Wrapping(wrapping(settings), settings.state_dir / "vault", opened, own_user(settings))


def own_user(settings: Settings) -> int | None:
    """Return vaultd's user; None if this process cannot become another one."""
    return int(settings.get("sallyport.uids.vaultd")) if os.geteuid() == 0 else None


def state(settings: Settings) -> str:
    """Return what the key is, after a check that it opens: one login to its token or Vault.

    Raises:
        SettingsError, MasterKeyError: it does not open.
    """
    if is_credential(settings):
        return "a systemd credential"
    path, source = settings.master_key_file, KeySource(settings.get("sallyport.vault.key_source"))
    with wrapping_of(settings) as wraps:
        if not os.path.lexists(path):
            if source in WRAPPING and wraps.directory.exists():  # without it a refused PIN could not be noted
                try_out(wraps)
            return f"{source}: the key is made at the first start"
        load(path, {}, wraps, wraps.user)
    found = source_of(path, wraps.user) or KeySource.FILE
    if found != source:
        raise SettingsError(f"{path} is of the source {found}, and sallyport.vault.key_source is {source}")
    return f"{source}: {path} opens"


@contextlib.contextmanager
def credentials(settings: Settings) -> Iterator[dict[KeySource, int]]:
    """Open PIN and credential, for a command of root; closed after the block. A missing file is left out."""
    found: dict[KeySource, int] = {}
    try:
        for source, path in _credential_files(settings).items():
            with contextlib.suppress(OSError):
                found[source] = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        yield found
    finally:
        close_all(list(found.values()))


def differs(one: Settings, other: Settings) -> bool:
    """Return whether two servers would keep the key in different ways."""
    return (wrapping(one), one.master_key_file) != (wrapping(other), other.master_key_file)


def note(settings: Settings) -> dict[str, Any]:
    """Return the keys of these settings that other commands need; none of them is a secret."""
    tables: dict[str, Any] = {"key_source": settings.get("sallyport.vault.key_source")}
    for table in WRAPPING:
        prefix = f"sallyport.vault.{table}."
        keys = {key.removeprefix(prefix): each for key, each in settings.values.items() if key.startswith(prefix)}
        tables[table] = {key: str(each) if isinstance(each, Path) else each for key, each in keys.items() if each}
    return tables


def _credential_files(settings: Settings) -> Mapping[KeySource, Path]:
    wanted = {
        KeySource.PKCS11: settings.get("sallyport.vault.pkcs11.pin_file"),
        KeySource.TRANSIT: settings.get("sallyport.vault.transit.credential_file"),
    }
    return {source: Path(path) for source, path in wanted.items() if path is not None}


def _token(settings: Settings) -> Pkcs11Token | None:
    def get(key: str) -> Any:
        return settings.get(f"sallyport.vault.pkcs11.{key}")

    if not get("module"):
        return None
    for key in ("token_label", "key_label", "pin_file"):
        if not get(key):
            raise SettingsError(f"sallyport.vault.pkcs11.{key} is missing")
    return Pkcs11Token(
        str(get("module")), get("token_label"), get("key_label"), str(get("pin_file")), dict(get("environment"))
    )


def _transit(settings: Settings) -> TransitKey | None:
    def get(key: str) -> Any:
        return settings.get(f"sallyport.vault.transit.{key}")

    if not get("address"):
        return None
    for key in ("credential_file", "key", "mount", *(() if get("auth") == "token" else ("role",))):
        if not get(key):
            raise SettingsError(f"sallyport.vault.transit.{key} is missing")
    server = HashicorpServer(
        get("address").rstrip("/"),
        str(get("ca_file") or settings.upstream_roots),
        get("namespace"),
        Auth(get("auth")),
        get("auth_mount"),
        get("role"),
        (),
    )
    return TransitKey(server, get("mount"), get("key"))

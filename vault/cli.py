"""`sallyport vault init | put | list | rotate | delete | limit | unlimit | reset | revoke-all | freeze | unfreeze |
backends | check | rekey`.

- A value comes from standard input or a file, never from the command line, where every user of the host could read it.
- What can be neither a header value nor a client certificate is refused before it is sent; a line break at the end of a
  header value is removed only when asked for.
- Output holds names and metadata, never a value.

`init` makes the key file; all others talk to the running vaultd, which answers uid 0 only. `rekey` makes a new key
file, has the vault sealed with it, and puts it in the place of the old one. Repeated, it goes on where it stopped. The
unwrapper (`vault.wrapping`) makes a key for a token or for Vault: this process never has it.
"""

import argparse
import asyncio
import getpass
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TextIO

import wire
from policy.facts import Scheme
from policy.references import is_reference
from vault.client import AdminClient
from vault.conditions import ConditionError, Selectors, UseLimits
from vault.freeze import Extent
from vault.grants import GrantError, SecretBinding, secret_name
from vault.keyring import MasterKeyError, create, next_file, replace
from vault.limits import ReferenceLimit
from vault.secret import MAX_SECRET_BYTES, Secret
from vault.stores.port import SecretInfo, stored_problem
from vault.wrapping.asking import Wrapping
from vault.wrapping.sources import KeySource
from wire.api.vaultd import LimitForm, Listed, Revoked, Used

_FOR_ROOT = "the vault answers root only: run this command as root"


class UsageError(Exception):
    """What was asked cannot be done; the message is for the operator."""


class UnreachableError(Exception):
    """The vault cannot be asked; the message says what to do."""


@dataclass(frozen=True, slots=True)
class VaultPlaces:
    """Where things are on this host, as settings say; `owner` is the (uid, gid) vaultd runs as, None for one's own."""

    socket: Path
    master_key_file: Path
    owner: tuple[int, int] | None = None
    wrapping: Wrapping | None = None
    """Makes wrapped keys; its descriptors go to vaultd with a change of the key. None: the key is plain."""

    @property
    def server(self) -> int:
        """The uid of vaultd, which alone is sent a secret."""
        return os.geteuid() if self.owner is None else self.owner[0]


def main(
    arguments: Sequence[str],
    places: VaultPlaces,
    *,
    stdin: BinaryIO | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run one command; return its exit status: 0 done, 1 refused, 2 wrong usage."""
    top = argparse.ArgumentParser(prog="sallyport vault", allow_abbrev=False)
    add_commands(top)
    return run(top.parse_args(arguments), places, stdin=stdin, stdout=stdout, stderr=stderr)


def run(
    options: argparse.Namespace,
    places: VaultPlaces,
    *,
    stdin: BinaryIO | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run the command that `add_commands` read; return its exit status."""
    out, problems = stdout or sys.stdout, stderr or sys.stderr
    try:
        if options.action == "init":
            _not_a_credential(places)
            create(places.master_key_file, places.owner, places.wrapping)
            said = f"new master key in {places.master_key_file}; without a backup of it the vault is lost"
        else:
            value = _value(options, stdin or sys.stdin.buffer) if options.action in ("put", "rotate") else None
            said = _ask(options, value, places)
    except (UsageError, GrantError, ConditionError) as error:
        print(f"sallyport vault: {error}", file=problems)
        return 2
    except wire.RemoteError as error:
        print(f"sallyport vault: {error.message} ({error.code})", file=problems)
        return 1
    except (MasterKeyError, UnreachableError) as error:
        print(f"sallyport vault: {error}", file=problems)
        return 1
    if said:
        print(said, file=out)
    return 0


def add_commands(top: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
    """Add the commands of `sallyport vault` to a parser; `parents` has options that each of them takes besides."""
    commands = top.add_subparsers(dest="action", required=True)

    def command(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, allow_abbrev=False, parents=list(parents))

    command("init", "make the master key")
    command("rekey", "replace the master key: seal everything with a new one; repeat it if it was broken off")
    command("list", "show names and bindings").add_argument("--json", action="store_true")
    command("backends", "show the configured backends of secrets, and the problems that they have now")
    command("check", "read a reference to a backend's secret, and show for how long its value is used").add_argument(
        "reference", help="as a policy names it: vault://mount/path#field, env://NAME, ..."
    )
    put = command("put", "store a new secret; its value comes from standard input")
    rotate = command("rotate", "replace a secret's value")
    delete = command("delete", "delete a secret and call it back from all sandboxes")
    limit = command("limit", "limit the use of backends' secrets, in place of a former limit with this pattern")
    unlimit = command("unlimit", "end a limit of backends' secrets")
    reset = command("reset", "count the uses of a limited secret from zero again")
    for action, about in (
        ("revoke-all", "end all leases and cut the flows that used them; sandboxes may ask for secrets again"),
        ("freeze", "release no secret any more, end all leases, and cut the flows that used them"),
        ("unfreeze", "end the freeze that was begun with the same options"),
    ):
        scoped = command(action, about)
        scoped.add_argument("--sandbox", help="those of this sandbox only")
        scoped.add_argument("--secret", help="this secret only")
    for named in (put, rotate, delete, reset):
        named.add_argument("name")
    for valued in (put, rotate):
        valued.add_argument("--file", type=Path, help="read the value from this file instead")
        valued.add_argument("--strip-newline", action="store_true", help="remove one line break at the end")
    for limited in (limit, unlimit):
        limited.add_argument("pattern", help="a reference (vault://mount/path#field, ...), or a prefix and *")
    for placed, port, scheme in ((put, "443, for postgres 5432", "https"), (limit, "any", "any")):
        placed.add_argument("--host", action="append", required=placed is put, help="an exact host name; repeatable")
        placed.add_argument("--port", action="append", type=int, help=f"default {port}; may be repeated")
        placed.add_argument(
            "--scheme",
            action="append",
            choices=[Scheme.HTTPS.value, Scheme.HTTP.value, Scheme.POSTGRES.value],
            help=f"default {scheme}; http is in the clear",
        )
        placed.add_argument("--expires", help="RFC 3339 time with zone")
        placed.add_argument("--metadata", action="append", metavar="KEY=VALUE", help="only for sandboxes with it")
        placed.add_argument("--image", action="append", help="only for sandboxes from this image (name or id)")
        placed.add_argument("--max-uses", type=int, help="requests with it, in all; each reference is counted alone")
        placed.add_argument("--max-uses-per-sandbox", type=int, help="requests with it by each sandbox")
        placed.add_argument("--max-bytes", type=int, help="bytes of the requests with it, in all: heads and bodies")
        placed.add_argument("--max-bytes-per-sandbox", type=int, help="bytes of the requests with it by each sandbox")
    put.add_argument("--method", action="append", help="default any; may be repeated")
    put.add_argument("--path", action="append", help="exact, or a prefix and *; default any; may be repeated")


def _ask(options: argparse.Namespace, value: Secret | None, places: VaultPlaces) -> str:
    try:
        return asyncio.run(_talk(options, value, places))
    except (FileNotFoundError, ConnectionRefusedError):
        raise UnreachableError(f"the server is not running: ./run serve (nothing at {places.socket})") from None
    except PermissionError:
        raise UnreachableError(_FOR_ROOT) from None
    except wire.WrongServer as error:
        raise UnreachableError(f"{error}: nothing was sent to it") from None
    except TimeoutError:
        raise UnreachableError("the server does not answer in time; its log says more") from None
    except OSError:
        if os.geteuid() != 0:  # it hangs up on other users
            raise UnreachableError(_FOR_ROOT) from None
        raise UnreachableError("the server ended the connection; its log says more") from None


async def _talk(options: argparse.Namespace, value: Secret | None, places: VaultPlaces) -> str:
    if hasattr(options, "name") and not (options.action == "reset" and is_reference(options.name)):
        secret_name(options.name)
    binding = _binding(options) if options.action == "put" else None
    limit = _limit(options) if options.action == "limit" else None
    client = await AdminClient.connect(places.socket, places.server)
    try:
        match options.action:
            case "put":
                assert value is not None and binding is not None  # noqa: S101 - narrows: set for put just above
                await client.put(options.name, value, binding)
                return f"stored {options.name}"
            case "rotate":
                assert value is not None  # noqa: S101 - narrows: `run` reads one for rotate
                return f"{options.name} is at version {await client.rotate(options.name, value)}"
            case "delete":
                await client.delete(options.name)
                return f"deleted {options.name}"
            case "reset":
                await client.reset(options.name)
                return f"the uses of {options.name} are counted from zero"
            case "limit":
                assert limit is not None  # noqa: S101 - narrows: set for limit just above
                return f"{limit.pattern} is limited; {_ended(await client.limit(limit))}"
            case "unlimit":
                await client.unlimit(options.pattern)
                return f"the limit of {options.pattern} has ended"
            case "revoke-all":
                return _ended(await client.revoke_all(options.sandbox, options.secret))
            case "freeze":
                ended = _ended(await client.freeze(options.sandbox, options.secret))
                return f"{_frozen(options.sandbox, options.secret)} is frozen; {ended}"
            case "unfreeze":
                await client.unfreeze(options.sandbox, options.secret)
                return (
                    f"{_frozen(options.sandbox, options.secret)} is not frozen any more{_left(await client.listed())}"
                )
            case "backends":
                return "\n".join(
                    f"{one.name}  {one.about}  {one.problem or 'ready'}" for one in await client.backends()
                )
            case "check":
                found = await client.check(options.reference)
                return (
                    f"{options.reference} has a value; it is read again after {found.fresh_seconds} s, "
                    f"and used for {found.valid_seconds} s at most"
                )
            case "rekey":
                following = next_file(places.master_key_file)
                _not_a_credential(places)
                if not os.path.lexists(following):
                    create(following, places.owner, places.wrapping)
                credentials = {} if places.wrapping is None else places.wrapping.credentials
                await client.rekey({source.value: fd for source, fd in credentials.items()})
                replace(places.master_key_file)
                return f"a new master key is in {places.master_key_file}; back it up, and destroy copies of the old one"
            case _:
                return _listed(await client.listed(), options.json)
    finally:
        await client.close()


def _not_a_credential(places: VaultPlaces) -> None:
    if places.wrapping is not None and places.wrapping.source is KeySource.CREDENTIAL:
        raise UsageError("systemd has the master key: see 'A new master key' in docs/operations.md")


def _binding(options: argparse.Namespace) -> SecretBinding:
    port = 5432 if options.scheme == [Scheme.POSTGRES.value] else 443
    return SecretBinding.make(
        options.host,
        options.port or (port,),
        options.scheme or ("https",),
        options.method,
        options.path,
        options.expires,
        *_conditions(options),
    )


def _limit(options: argparse.Namespace) -> ReferenceLimit:
    places = (options.host, options.port, options.scheme)
    return ReferenceLimit.make(options.pattern, *places, options.expires, *_conditions(options))


def _conditions(options: argparse.Namespace) -> tuple[Selectors, UseLimits]:
    selectors = Selectors.make(dict(map(_pair, options.metadata or ())), options.image or ())
    limits = UseLimits(options.max_uses, options.max_uses_per_sandbox, options.max_bytes, options.max_bytes_per_sandbox)
    return selectors, limits


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError("--metadata is KEY=VALUE")
    return key, value


def _ended(revoked: Revoked) -> str:
    said = f"{revoked.confirmed} workers have dropped its leases"
    return said if not revoked.cut_off else f"{said}, {revoked.cut_off} did not confirm and lost their channel"


def _frozen(sandbox: str | None, secret: str | None) -> str:
    return str(Extent(sandbox, secret))


def _left(listed: Listed) -> str:
    left = [_frozen(one.sandbox, one.secret) for one in listed.frozen]
    return f"; still frozen: {', '.join(left)}" if left else ""


def _listed(listed: Listed, as_json: bool) -> str:
    frozen = [f"FROZEN since {one.since}: {_frozen(one.sandbox, one.secret)}" for one in listed.frozen]
    secrets = [SecretInfo.of(form) for form in listed.secrets]
    if as_json:
        everything = {one.secret for one in listed.frozen if one.sandbox is None}
        return json.dumps(
            [
                {
                    **info.to_json(),
                    **_counts(info, listed.used.get(info.name)),
                    **({"frozen": True} if everything & {None, info.name} else {}),
                }
                for info in secrets
            ],
            indent=2,
        )
    lines = [_line(info, listed.used.get(info.name)) for info in secrets]
    counted = [
        f"{name}  used {used.uses}; sent {used.sent} bytes" for name, used in listed.used.items() if is_reference(name)
    ]
    return "\n".join([*frozen, *lines, *map(_limit_line, listed.limits), *counted])


def _limit_line(form: LimitForm) -> str:
    limit = ReferenceLimit.of(form)
    places = (("host", limit.hosts), ("port", limit.ports), ("scheme", limit.schemes))
    said = [f"{what} {each}" for what, found in places for each in sorted(map(str, found or ()))]
    said += [] if limit.expires is None else [f"expires {form.expires}"]
    said += _sandboxes(limit.selectors)
    most = limit.limits
    said += [] if most.uses is None else [f"at most {most.uses} uses"]
    said += [] if most.sent is None else [f"at most {most.sent} bytes"]
    return f"LIMIT {limit.pattern}  {'; '.join([*said, *_by_each(most)])}"


def _by_each(most: UseLimits) -> list[str]:
    said = [] if most.sandbox_uses is None else [f"at most {most.sandbox_uses} uses by each sandbox"]
    return said if most.sandbox_sent is None else [*said, f"at most {most.sandbox_sent} bytes by each sandbox"]


def _counts(info: SecretInfo, used: Used | None) -> dict[str, int]:
    """Return the numbers that are counted of a stored secret."""
    if used is None:
        return {}
    limits = info.binding.limits
    return {**({"used": used.uses} if limits.of_uses else {}), **({"sent": used.sent} if limits.of_bytes else {})}


def _sandboxes(selectors: Selectors) -> list[str]:
    metadata = [f"metadata {key}={value}" for key, value in selectors.metadata]
    return metadata + [f"image {image}" for image in sorted(selectors.images)]


def _line(info: SecretInfo, used: Used | None) -> str:
    item = info.to_json()
    where = ", ".join(f"{host}:{'/'.join(map(str, item['ports']))}" for host in item["hosts"])
    limits = [f"{key} {' '.join(item[key])}" for key in ("schemes", "methods", "paths") if item[key]]
    if item["expires"]:
        limits.append(f"expires {item['expires']}")
    limits += _sandboxes(info.binding.selectors)
    most, counts = info.binding.limits, _counts(info, used)
    limits += [f"used {counts['used']} of {most.uses or 'any number'}"] if "used" in counts else []
    limits += [f"sent {counts['sent']} of {most.sent or 'any number of'} bytes"] if "sent" in counts else []
    limits += _by_each(most)
    return f"{item['name']}  v{item['version']}  {where}  {'; '.join(limits)}"


def _value(options: argparse.Namespace, stdin: BinaryIO) -> Secret:
    if options.file is not None:
        try:
            with options.file.open("rb") as file:
                data = file.read(MAX_SECRET_BYTES + 3)
        except OSError as error:
            raise UsageError(f"{options.file}: {error.strerror}") from None
    elif stdin.isatty():
        data = getpass.getpass(f"value of {options.name}: ").encode("utf-8", "surrogateescape")
    else:
        data = stdin.read(MAX_SECRET_BYTES + 3)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError("the value is not UTF-8 text") from None
    if options.strip_newline:
        text = text.removesuffix("\n").removesuffix("\r")
    if problem := stored_problem(text, datetime.now(UTC)):
        hint = "; use printf %s, or --strip-newline" if text.endswith("\n") else ""
        raise UsageError(problem + hint)
    return Secret(text)

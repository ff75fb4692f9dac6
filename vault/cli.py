"""`sallyport vault init | put | list | rotate | delete`.

- A value comes from standard input or a file, never from the command line, where every user of the host could read it.
- What cannot be a header value is refused before it is sent; a line break at the end is removed only when asked for.
- Output holds names and metadata, never a value.

`init` works on the key file; the rest talks to the running vaultd, which answers uid 0 only.
"""

import argparse
import asyncio
import getpass
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import wire
from vault.client import AdminClient
from vault.grants import GrantError, SecretBinding, secret_name
from vault.keyring import MasterKeyError, create
from vault.secret import MAX_SECRET_BYTES, Secret, value_problem


class UsageError(Exception):
    """What was asked cannot be done; the message is for the person who asked."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are on this host, as settings say; `owner` is the (uid, gid) vaultd runs as, None for one's own."""

    socket: Path
    master_key_file: Path
    owner: tuple[int, int] | None = None


def main(
    arguments: Sequence[str],
    places: Places,
    *,
    stdin: BinaryIO | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run one command; return its exit status: 0 done, 1 refused, 2 wrong usage."""
    out, problems = stdout or sys.stdout, stderr or sys.stderr
    options = parser().parse_args(arguments)
    try:
        if options.command == "init":
            create(places.master_key_file, places.owner)
            print(f"new master key in {places.master_key_file}; without a backup of it the vault is lost", file=out)
            return 0
        value = _value(options, stdin or sys.stdin.buffer) if options.command in ("put", "rotate") else None
        asyncio.run(_talk(options, value, places, out))
    except (UsageError, GrantError) as error:
        print(f"sallyport vault: {error}", file=problems)
        return 2
    except wire.RemoteError as error:
        print(f"sallyport vault: {error.message} ({error.code})", file=problems)
        return 1
    except MasterKeyError as error:
        print(f"sallyport vault: {error}", file=problems)
        return 1
    except OSError as error:  # TimeoutError and ConnectionError among them
        print(f"sallyport vault: cannot reach vaultd at {places.socket}: {error.strerror or error}", file=problems)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line of `sallyport vault`."""
    top = argparse.ArgumentParser(prog="sallyport vault", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("init", help="make the master key")
    commands.add_parser("list", help="show names and bindings").add_argument("--json", action="store_true")
    put = commands.add_parser("put", help="store a new secret; its value comes from standard input", allow_abbrev=False)
    rotate = commands.add_parser("rotate", help="replace a secret's value", allow_abbrev=False)
    delete = commands.add_parser("delete", help="delete a secret and call it back from all sandboxes")
    for command in (put, rotate, delete):
        command.add_argument("name")
    for command in (put, rotate):
        command.add_argument("--file", type=Path, help="read the value from this file instead")
        command.add_argument("--strip-newline", action="store_true", help="remove one line break at the end")
    put.add_argument("--host", action="append", required=True, help="an exact host name; may be repeated")
    put.add_argument("--port", action="append", type=int, help="default 443; may be repeated")
    put.add_argument("--scheme", action="append", choices=["https", "http"], help="default https; http is in the clear")
    put.add_argument("--method", action="append", help="default any; may be repeated")
    put.add_argument("--path", action="append", help="exact, or a prefix and *; default any; may be repeated")
    put.add_argument("--expires", help="RFC 3339 time with zone")
    return top


async def _talk(options: argparse.Namespace, value: Secret | None, places: Places, out: TextIO) -> None:
    if options.command != "list":
        secret_name(options.name)
    binding = _binding(options) if options.command == "put" else None
    client = await AdminClient.open(places.socket)
    try:
        match options.command:
            case "put":
                assert value is not None and binding is not None  # noqa: S101 - narrows: set for put just above
                await client.put(options.name, value, binding)
                print(f"stored {options.name}", file=out)
            case "rotate":
                assert value is not None  # noqa: S101 - narrows: `main` reads one for rotate
                print(f"{options.name} is at version {await client.rotate(options.name, value)}", file=out)
            case "delete":
                await client.delete(options.name)
                print(f"deleted {options.name}", file=out)
            case _:
                _show(await client.list_secrets(), options.json, out)
    finally:
        await client.close()


def _binding(options: argparse.Namespace) -> SecretBinding:
    return SecretBinding.make(
        options.host,
        options.port or (443,),
        options.scheme or ("https",),
        options.method,
        options.path,
        options.expires,
    )


def _show(secrets: list[dict[str, Any]], as_json: bool, out: TextIO) -> None:
    if as_json:
        print(json.dumps(secrets, indent=2), file=out)
        return
    for item in secrets:
        where = ", ".join(f"{host}:{'/'.join(map(str, item['ports']))}" for host in item["hosts"])
        limits = [f"{key} {' '.join(item[key])}" for key in ("schemes", "methods", "paths") if item[key]]
        if item["expires"]:
            limits.append(f"expires {item['expires']}")
        print(f"{item['name']}  v{item['version']}  {where}  {'; '.join(limits)}", file=out)


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
    if problem := value_problem(text):
        hint = "; use printf %s, or --strip-newline" if text.endswith("\n") else ""
        raise UsageError(problem + hint)
    return Secret(text)

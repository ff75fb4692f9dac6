"""`sallyport image add | alias | list | show | remove`: asks the running hostd, which answers root only.

- A source that begins with `/`, `./` or `../` is a file: an archive of `docker save`, an OCI archive, or a directory
  with an OCI layout. `docker:NAME` is an image that the host's Docker has. Anything else is a name in a registry.
- A login of a registry is a secret of the vault, and never on this command line.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import wire
from wire import codec
from wire.api.hostd import (
    AddImage,
    AliasImage,
    ImageOrigin,
    ListedImage,
    ListImages,
    RemovedImage,
    RemoveImage,
    ShowImage,
    ShownImage,
)
from wire.blocking import BlockingClient
from wire.sockets import ROOT

_SECONDS = 60.0
_ADD_SECONDS = 2 * 3600.0
"""hostd limits the fetch and each step; several additions wait for each other."""
_DOCKER = "docker:"
_SHOWN = 5


def add_commands(top: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
    """Add the commands of `sallyport image` to a parser; `parents` has options that each of them takes besides."""
    commands = top.add_subparsers(dest="action", required=True)

    def command(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, allow_abbrev=False, parents=list(parents))

    add = command("add", "add an image from an archive, a directory, Docker or a registry")
    add.add_argument("source", help="./FILE.tar, ./DIRECTORY, docker:NAME, or a name that sallyport.registry allows")
    add.add_argument("--name", action="append", default=[], help="its name, else that of the source; may be repeated")
    add.add_argument("--select", default="", help="its name in an archive of several images")
    add.add_argument("--replace", action="store_true", help="take the names from the images that have them")
    alias = command("alias", "give an image a further name")
    alias.add_argument("name")
    alias.add_argument("alias")
    alias.add_argument("--replace", action="store_true", help="take the name from the image that has it as an alias")
    command("list", "list the images that sandboxes can be started from").add_argument("--json", action="store_true")
    show = command("show", "show an image; of its variables the names only")
    show.add_argument("name")
    show.add_argument("--json", action="store_true")
    command("remove", "remove an image, or an alias; sandboxes that run from it continue").add_argument("name")


def run(
    options: argparse.Namespace, socket: Path, *, stdout: TextIO | None = None, stderr: TextIO | None = None
) -> int:
    """Run the command that `add_commands` read; return its exit status: 0 done, 1 refused."""
    out, problems = stdout or sys.stdout, stderr or sys.stderr
    try:
        said = _ask(options, socket)
    except wire.RemoteError as error:
        print(f"sallyport image: {error.message} ({error.code})", file=problems)
        return 1
    except (FileNotFoundError, ConnectionRefusedError):
        print(f"sallyport image: the server is not running: ./run serve (nothing at {socket})", file=problems)
        return 1
    except wire.WrongServer as error:
        print(f"sallyport image: {error}: nothing was sent to it", file=problems)
        return 1
    except OSError as error:
        if os.geteuid() != 0:
            print("sallyport image: the server answers root only: run this command as root", file=problems)
        elif isinstance(error, TimeoutError):
            print("sallyport image: the server does not answer in time; its log says more", file=problems)
        else:
            print("sallyport image: the server ended the connection; its log says more", file=problems)
        return 1
    if said:
        print(said, file=out)
    return 0


def _ask(options: argparse.Namespace, socket: Path) -> str:
    with BlockingClient(socket, ROOT, _ADD_SECONDS if options.action == "add" else _SECONDS) as client:
        match options.action:
            case "add":
                added = client.ask(_addition(options))
                return f"added {added.name}: {added.digest}"
            case "alias":
                changed = client.ask(AliasImage(options.name, options.alias, options.replace))
                return f"{options.alias} is {changed.name}: {changed.digest}"
            case "show":
                shown = client.ask(ShowImage(options.name))
                return _json(shown) if options.json else _shown(shown)
            case "remove":
                return _removed(client.ask(RemoveImage(options.name)))
            case _:
                images = client.ask(ListImages()).images
                return json.dumps([codec.encode(one) for one in images], indent=2) if options.json else _table(images)


def _addition(options: argparse.Namespace) -> AddImage:
    source, origin = options.source, ImageOrigin.REGISTRY
    if source.startswith(("/", "./", "../")) or source in (".", ".."):
        source, origin = os.path.abspath(source), ImageOrigin.FILE
    elif source.startswith(_DOCKER):
        source, origin = source.removeprefix(_DOCKER), ImageOrigin.DOCKER
    return AddImage(origin, source, tuple(options.name), options.select, options.replace)


def _table(images: Sequence[ListedImage]) -> str:
    return "\n".join(_line(image) for image in images)


def _line(image: ListedImage) -> str:
    parts = [image.name, (image.digests or (image.digest,))[0], _size(image.size)]
    parts.append(f"from {'the settings: ' if image.configured else ''}{image.source}")
    parts.append(f"added {image.added}")
    if image.aliases:
        parts.append(f"aliases {' '.join(image.aliases)}")
    if not image.present:
        parts.append("MISSING in Docker: remove it, or add it again")
    return "  ".join(parts)


def _shown(image: ShownImage) -> str:
    listed = image.listed
    rows = (
        ("name", listed.name),
        ("aliases", " ".join(listed.aliases)),
        ("id", listed.digest),
        ("digests", " ".join(listed.digests)),
        ("source", f"the settings: {listed.source}" if listed.configured else listed.source),
        ("added", listed.added),
        ("size", _size(listed.size)),
        ("entrypoint", json.dumps(image.entrypoint) if image.entrypoint else ""),
        ("command", json.dumps(image.cmd) if image.cmd else ""),
        ("user", image.user or "root"),
        ("directory", image.workdir),
        ("variables", " ".join(image.env_names)),
        ("layers", "\n            ".join(image.layers)),
        ("sandboxes", " ".join(image.sandboxes)),
    )
    return "\n".join(f"{name:<11} {text}" for name, text in rows if text)


def _removed(removed: RemovedImage) -> str:
    lines = [f"removed {' '.join(removed.names)}"]
    if removed.sandboxes:
        some = ", ".join(removed.sandboxes[:_SHOWN])
        more = f" and {len(removed.sandboxes) - _SHOWN} more" if len(removed.sandboxes) > _SHOWN else ""
        lines.append(f"{some}{more} still run from it; its bytes are removed with the last of them")
    return "\n".join(lines)


def _json(shown: ShownImage) -> str:
    return json.dumps(codec.encode(shown), indent=2)


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB"

"""`sallyport volume list | remove`: the named volumes of this host, through the running hostd.

hostd answers these requests of root only.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import wire
from wire.api.hostd import ListVolumes, RemoveVolume, VolumeState, check_volume_name
from wire.blocking import BlockingClient
from wire.sockets import ROOT, WrongServer

_SECONDS = 30.0


def add_commands(top: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
    """Add the commands of `sallyport volume`; `parents` has options that each of them takes besides."""
    commands = top.add_subparsers(dest="action", required=True)
    listed = commands.add_parser("list", help="show the named volumes", allow_abbrev=False, parents=list(parents))
    listed.add_argument("--json", action="store_true")
    remove = commands.add_parser(
        "remove", help="remove a volume and all of its files", allow_abbrev=False, parents=list(parents)
    )
    remove.add_argument("name")


def run(options: argparse.Namespace, socket: Path, server: int = ROOT) -> int:
    """Run one command; return its exit status: 0 done, 1 refused, 2 wrong usage.

    Args:
        server: the user of hostd.
    """
    try:
        if options.action == "remove":
            check_volume_name(options.name)
        with BlockingClient(socket, server, _SECONDS) as client:
            if options.action == "remove":
                client.ask(RemoveVolume(options.name))
                print(f"volume {options.name} is removed")
            else:
                _print(client.ask(ListVolumes()).volumes, as_json=options.json)
    except ValueError as error:
        return _problem(str(error), 2)
    except wire.RemoteError as error:
        return _problem(f"{error.message} ({error.code})")
    except WrongServer as error:
        return _problem(str(error))
    except PermissionError:
        return _problem("hostd answers root only: run this command as root")
    except TimeoutError:
        return _problem("the server does not answer in time; its log says more")
    except OSError:
        return _problem(f"the server is not running: ./run serve (nothing answers at {socket})")
    return 0


def _print(volumes: Sequence[VolumeState], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(volume) for volume in volumes]))
        return
    for volume in volumes:
        made = datetime.fromtimestamp(volume.made_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ends = " removed with it" if volume.deleted_with else ""
        print(
            f"{volume.name} {volume.size_bytes >> 20}Mi used by {volume.sandboxes} sandboxes, "
            f"made {made} by {volume.made_by or 'an unknown sandbox'}{ends}"
        )


def _problem(text: str, status: int = 1) -> int:
    print(f"sallyport volume: {text}", file=sys.stderr)
    return status

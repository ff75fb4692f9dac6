"""Network namespaces with names of `ip netns`. Each is noted in the home before it gets its name.

The note identifies the namespace: the boot, its number (inode) and its cookie. `./run clean` removes a namespace only
if a note of its home identifies exactly this one.
"""

import os
import socket
import subprocess
import threading
from pathlib import Path

HOME = Path(os.environ.get("SALLYPORT_HOME", "/var/lib/sallyport"))
"""The home of this process, even if its servers get another one."""
SO_NETNS_COOKIE = 71
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class InternetError(Exception):
    """The internet could not be set up; the message has the failed command and the reason."""


def ip(*arguments: str) -> None:
    """Run `ip`; raise `InternetError` with its message if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InternetError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def cookie() -> int:
    """Return the cookie of this thread's network namespace, unique since the start of the host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8), "little")


def make(name: str, home: Path = HOME) -> None:
    """Make a network namespace and note it in `home`."""
    failure: list[Exception] = []

    def run() -> None:
        try:
            os.unshare(os.CLONE_NEWNET)
            notes = home / "namespaces"
            notes.mkdir(parents=True, exist_ok=True, mode=0o711)
            inode = os.stat("/proc/thread-self/ns/net").st_ino
            (notes / name).write_text(f"{_BOOT_ID.read_text().strip()} {inode} {cookie()}\n")
            ip("netns", "attach", name, str(threading.get_native_id()))
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run)  # it ends, and so leaves the namespace
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


def remove(name: str, home: Path = HOME) -> None:
    """Remove the namespace of this name, if there is one, then its note."""
    if os.path.exists(f"/run/netns/{name}"):
        ip("netns", "del", name)
    (home / "namespaces" / name).unlink(missing_ok=True)

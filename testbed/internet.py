"""A small internet in separate namespaces: names, addresses, servers and a wire that can be captured.

    sandbox -> gateway worker -> [up] ===veth=== [net] git, index, API, attacker, metadata, DNS
                control       -> [ctl] ==veth===   |

- `up` is the workers' upstream namespace. It has one address (the "host's public address").
- `net` has every server, on addresses that look public and exist only there.
- `ctl` is connected like a host without any gateway: what a control run sends from there does arrive.
- Nothing is connected to the host's own network. The removal of the namespaces removes everything.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lifecycle.posture import attempts, capture, ways_out
from testbed import namespaces
from testbed.pki import Authority, make_authority, write_host_certificate
from testbed.with_parent import with_parent

GIT = "git.bank.example"
INDEX = "pypi.bank.example"
API = "api.bank.example"
STATUS = "status.bank.example"
SPLICED = "raw.bank.example"
"""Its port 443 accepts raw bytes, see `raw_host`."""
SILENT = "silent.bank.example"
"""Its address answers no SYN."""
ATTACKER = "www.attacker.example"
TUNNEL_ZONE = "t.attacker.example"

ADDRESSES = {
    GIT: "93.184.216.10",
    INDEX: "93.184.216.11",
    API: "93.184.216.12",
    STATUS: "93.184.216.13",
    SPLICED: "93.184.216.14",
    ATTACKER: attempts.ATTACKER_ADDRESS,
}
SILENT_ADDRESS = "93.184.216.15"
REGISTRY = "registry.bank.example"
"""A registry of images, if one runs there (`testbed.registry`)."""
REGISTRY_ADDRESS = "93.184.216.16"
STAND_INS = (
    *("pypi.org", "files.pythonhosted.org", "registry.npmjs.org"),
    *("github.com", "api.github.com", "deb.debian.org", "security.debian.org"),
    *("api.openai.com", "api.anthropic.com"),
    *("huggingface.co", "us.aws.cdn.hf.co", "cas-server.xethub.hf.co", "transfer.xethub.hf.co"),
    *("dynamodb.eu-west-1.amazonaws.com", "iam.amazonaws.com", "sts.eu-west-1.amazonaws.com"),
)
"""Services of the Internet, at one address, if a stand-in of them runs there."""
STAND_IN_ADDRESS = "93.184.216.17"
DATABASE = "db.bank.example"
"""A PostgreSQL, if one runs there (`tests.postgresql`)."""
DATABASE_ADDRESS = "93.184.216.18"
STORAGE = "s3.bank.example"
"""An object store, if one runs there (`testbed.storage`)."""
STORAGE_ADDRESS = "93.184.216.19"
AWS_STORAGE = "s3.eu-west-1.amazonaws.com"
"""The same under a name of AWS, if one runs there."""
AWS_STORAGE_ADDRESS = "93.184.216.20"
DNS_ADDRESS = "93.184.216.53"
METADATA_ADDRESS, ATTACKER_V6 = attempts.METADATA_ADDRESS, attempts.ATTACKER_V6
CONTROL_INTERFACE = "ctl0"
UP_ADDRESS = "93.184.217.1"
NET_ADDRESS = "93.184.217.2"
CONTROL_ADDRESS = "93.184.218.2"
CONTROL_GATEWAY = "93.184.218.1"
_CONTROL_GATEWAY_V6 = "2606:2800:221::1"
LOCAL_CANARY_PORTS = ways_out.HOST_PORTS
"""Ports on which the upstream namespace itself answers: the "host's own services", which no sandbox may reach."""


PREFIX = os.environ.get("SALLYPORT_TEST_INTERNET", "spdemo")
"""The prefix of the namespaces' names; `./run` gives each home a different one."""

in_namespace = capture.in_namespace
InternetError, ip = namespaces.InternetError, namespaces.ip


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file that another process writes, one a line, without an incomplete last line."""
    written, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in written.splitlines()]


def received_field(note: dict[str, Any], name: str) -> str | None:
    """Return the value of a header field that a server received; None if it received none.

    Raises:
        InternetError: the server received the field more than once.
    """
    values = [value for key, value in note["headers"] if key.lower() == name.lower()]
    if len(values) > 1:
        raise InternetError(f"{name} was received {len(values)} times")
    return str(values[0]) if values else None


@dataclass
class Internet:
    """The namespaces and the server process. Use as a context manager."""

    prefix: str
    directory: Path
    accounts: dict[str, str]
    """The servers' credentials: `git` and `index` are `user:password`, `api` a bearer token."""
    authority: Authority = field(default_factory=lambda: make_authority("Demo Internet Root"))
    _servers: subprocess.Popen[bytes] | None = None
    _canary: subprocess.Popen[bytes] | None = None

    @property
    def up(self) -> str:
        return f"{self.prefix}-up"

    @property
    def net(self) -> str:
        return f"{self.prefix}-net"

    @property
    def control(self) -> str:
        return f"{self.prefix}-ctl"

    @staticmethod
    def path(namespace: str) -> str:
        """Return the file through which `namespace` can be entered."""
        return f"/run/netns/{namespace}"

    @property
    def roots(self) -> Path:
        """The root certificate of this internet, PEM."""
        return self.directory / "root.pem"

    @property
    def request_log(self) -> Path:
        """The requests that the servers received, one JSON object a line."""
        return self.directory / "requests.jsonl"

    def notes(self) -> list[dict[str, Any]]:
        """Return the present content of the request log."""
        return whole_lines(self.request_log)

    def __enter__(self) -> "Internet":
        self.remove()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _make(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o711)
        self.roots.write_text(self.authority.pem)
        self.roots.chmod(0o644)
        for host in (*ADDRESSES, REGISTRY, DATABASE, STORAGE, AWS_STORAGE, *STAND_INS):
            write_host_certificate(self.authority, host, self.directory)
        for namespace in (self.up, self.net, self.control):
            namespaces.make(namespace)
            in_namespace(self.path(namespace), self._disable_router_solicitations)
            ip("-n", namespace, "link", "set", "lo", "up")
        in_namespace(self.path(self.net), lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
        self._link(self.up, UP_ADDRESS, "up0", NET_ADDRESS, "net0")
        self._link(self.control, CONTROL_ADDRESS, CONTROL_INTERFACE, CONTROL_GATEWAY, "net1")
        ip("-n", self.net, "-6", "addr", "add", f"{_CONTROL_GATEWAY_V6}/64", "dev", "net1", "nodad")
        self.connect_control()
        others = (REGISTRY_ADDRESS, STAND_IN_ADDRESS, DATABASE_ADDRESS, STORAGE_ADDRESS, AWS_STORAGE_ADDRESS)
        for address in (*ADDRESSES.values(), *others, DNS_ADDRESS, METADATA_ADDRESS):
            ip("-n", self.net, "addr", "add", f"{address}/32", "dev", "lo")
        ip("-n", self.net, "route", "add", "blackhole", f"{SILENT_ADDRESS}/32")
        ip("-n", self.net, "-6", "addr", "add", f"{ATTACKER_V6}/128", "dev", "lo", "nodad")
        self._servers = self._start("testbed.servers", self.path(self.net), str(self.directory), self._accounts_file())
        self._canary = self.start_canary(self.path(self.up), "host", *LOCAL_CANARY_PORTS)

    @staticmethod
    def _disable_router_solicitations() -> None:
        """Turn router solicitations off for new links: kernels send them for hours, and the tests count frames."""
        Path("/proc/sys/net/ipv6/conf/default/router_solicitations").write_text("0")

    def connect_control(self) -> None:
        """Give the control namespace its addresses and routes. Called again when runsc has removed them."""
        place = ("-n", self.control)
        ip(*place, "addr", "replace", f"{CONTROL_ADDRESS}/24", "dev", CONTROL_INTERFACE)
        ip(*place, "route", "replace", "default", "via", CONTROL_GATEWAY)
        ip(*place, "-6", "addr", "replace", "2606:2800:221::2/64", "dev", CONTROL_INTERFACE, "nodad")
        ip(*place, "-6", "route", "replace", "default", "via", _CONTROL_GATEWAY_V6)

    def _accounts_file(self) -> str:
        path = self.directory / "accounts"
        path.touch(mode=0o600)
        path.write_text("".join(f"{name}={value}\n" for name, value in self.accounts.items()))
        return str(path)

    def start_canary(self, netns: str, name: str, *ports: int) -> subprocess.Popen[bytes]:
        """Start listeners on `ports` of the namespace at `netns`; `canary_hits` counts their connections."""
        return self._start("testbed.canary", netns, str(self.directory / f"canary-{name}"), *map(str, ports))

    def canary_hits(self, name: str) -> int:
        """Return the number of connections that the canary `name` has accepted."""
        path = self.directory / f"canary-{name}"
        return path.stat().st_size if path.exists() else 0

    def _link(self, near: str, near_address: str, near_name: str, far_address: str, far_name: str) -> None:
        ip("-n", near, "link", "add", near_name, "type", "veth", "peer", "name", far_name, "netns", self.net)
        for namespace, name, address in ((near, near_name, near_address), (self.net, far_name, far_address)):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", namespace, "link", "set", name, "up")
        ip("-n", near, "route", "add", "default", "via", far_address)

    def _start(self, module: str, netns: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a server process in the namespace at `netns`; return when it reports that it listens."""
        process = subprocess.Popen(
            with_parent("nsenter", f"--net={netns}", sys.executable, "-m", module, *arguments), stdout=subprocess.PIPE
        )
        assert process.stdout is not None  # noqa: S101 - stdout=PIPE above
        if process.stdout.readline().strip() != b"ready":
            process.kill()
            raise InternetError(f"{module} did not start")
        return process

    def remove(self) -> None:
        """End the servers and remove the namespaces, if there are any."""
        for process in (self._servers, self._canary):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
        self._servers = self._canary = None
        for namespace in (self.up, self.net, self.control):
            namespaces.remove(namespace)

    def open_socket(self, namespace: str, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """Make a socket in `namespace`."""
        return in_namespace(self.path(namespace), lambda: socket.socket(family, kind, protocol))

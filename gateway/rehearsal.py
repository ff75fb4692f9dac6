"""Does once in the zygote what each worker does at its start and for its first flow, with throw-away values.

Libraries and the interpreter build state at the first use of a function: OpenSSL tables of algorithms, the codec its
type hints, CPython its specialized instructions. State from before the fork is shared by all workers. State from after
it is private memory of each worker, and its time is part of each launch.

- Nothing of a sandbox is used. The keys here are made here, and no part keeps them.
- OpenSSL's generators get their first seeds here. They detect a fork by the pid and take new seeds; `spawn` also adds
  new seeds to them.
- No event loop, thread or descriptor is made: a fork would copy them.
"""

import datetime
import json
import os
import random
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from audit import line
from gateway.config import GatewayConfig, WorkerConstants
from gateway.described import of_policy
from gateway.signing.signer import signer_of, signing_texts
from gateway.tls.contexts import ClientContexts, UpstreamContext
from gateway.tls.identity import LeafMint
from gateway.tls.memory import MemoryTls
from gateway.verdicts import ForwardHead
from policy.compiled import CompiledPolicy
from policy.decision import decide_flow, decide_name, decide_request
from policy.facts import FlowFacts, RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan
from policy.names import HostPattern
from policy.paths import PathPattern
from policy.rules import Action, Binding, Endpoint, Precedence, Rule, RuleList
from policy.signing import AwsSigning, HmacSigning
from wire.api import vaultd, worker
from wire.operations import parameters

TIMES = 3
"""From the third time on, CPython changes nothing more in the code of a function."""
_HOST = "rehearsal.invalid"
_SANDBOX = "sbx-" + "0" * 24
_ROUNDS_OF_A_HANDSHAKE = 8
_SIGNED = InjectionPlan("signed", "keys", InjectionKind.AWS_SIGV4, "Authorization", aws=AwsSigning("none", "s3"))
_HASHED = InjectionPlan("hashed", "key", InjectionKind.HMAC, "X-Sign", hmac=HmacSigning("X-Sign", "{method}{target}"))


def rehearse(constants: WorkerConstants) -> None:
    """Do everything `TIMES` times, under `constants`.

    Raises:
        RuntimeError: the handshake of the rehearsal does not end.
        ValueError: a part of it was refused.
    """
    random.seed(os.urandom(64))
    ssl.RAND_add(os.urandom(64), 64.0)
    for _ in range(TIMES):
        _configure(constants)
        _inspect()
        _sign()


def _configure(constants: WorkerConstants) -> None:
    policy = json.dumps(_policy().to_json())
    asked = {"sandbox": _SANDBOX, "generation": 1, "policy": policy, "seed": "0" * 64}
    request = worker.CONTROL.read("configure", asked)
    if not isinstance(request, worker.Configure):
        raise TypeError("configure is another request")
    config = GatewayConfig.of(request, constants)
    line.content("gateway.configure", "info", of_policy(config, None))
    parameters(worker.Confirmed(config.policy.digest))
    worker.CONTROL.read("beat", {})
    parameters(worker.Pulse(config.policy.digest, 0))
    parameters(vaultd.Intermediate())
    decide_name(config.policy, _HOST)
    decide_flow(config.policy, FlowFacts(_HOST, 443, Scheme.HTTPS))
    decide_request(config.policy, RequestFacts(_HOST, 443, Scheme.HTTPS, "GET", "/v1/me"))


def _policy() -> CompiledPolicy:
    """Return a policy that has every kind of part."""
    plan = InjectionPlan("rehearsal", "rehearsal", InjectionKind.BEARER, "Authorization")
    host, endpoint = HostPattern(_HOST), Endpoint(443, Scheme.HTTPS)
    paths = (PathPattern("/v1/*"),)
    allow = Rule("allow", Action.ALLOW, (host,), (), (endpoint,), ("GET",), paths, injections=(plan, _HASHED))
    signed = Rule("signed", Action.ALLOW, (host,), (), (endpoint,), ("PUT",), paths, injections=(_SIGNED,))
    deny = Rule("deny", Action.DENY, addresses=("203.0.113.0/24",))
    rules = RuleList("rehearsal", Precedence.DENY_WINS, rules=(deny, allow, signed))
    bindings = (Binding("rehearsal", (host,), (Scheme.HTTPS,), ("GET",), paths, (plan,)),)
    return CompiledPolicy("rehearsal", (rules,), always_deny=("203.0.113.1/32", "denied.invalid"), bindings=bindings)


def _inspect() -> None:
    certificate, key = _authority()
    mint = LeafMint(certificate, certificate, key)
    if mint.due or not mint.signs(_HOST):
        raise ValueError("the authority of the rehearsal is not valid")
    client = MemoryTls(UpstreamContext(certificate).connect(_HOST, [b"http/1.1"]))
    server = MemoryTls(ClientContexts().accept(mint.leaf(_HOST), http2=False))
    client.handshake()
    for _ in range(_ROUNDS_OF_A_HANDSHAKE):
        server.receive(client.to_send())
        client.receive(server.to_send())
        if client.secure and server.secure:
            break
    else:
        raise RuntimeError("the handshake of the rehearsal does not end")
    client.write(b"GET / HTTP/1.1\r\n\r\n")
    server.receive(client.to_send())
    client.end()


def _sign() -> None:
    facts = RequestFacts(_HOST, 443, Scheme.HTTPS, "GET", "/v1/me", "a=1")
    head = ForwardHead(b"/v1/me?a=1", b"", ((b"Host", _HOST.encode("ascii")),))
    for plan, secret in ((_SIGNED, "AKID:rehearsal"), (_HASHED, "rehearsal")):
        signing_texts(plan, secret, _HOST, 0.0)
        signer_of(plan, facts, head.headers, http2=False).sign(secret, head, 0.0, None)


def _authority() -> tuple[str, str]:
    """Return an authority that may sign `_HOST`, as PEM texts of its certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    now, hour = datetime.datetime.now(datetime.UTC), datetime.timedelta(hours=1)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rehearsal")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - hour)
        .not_valid_after(now + 12 * hour)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.NameConstraints([x509.DNSName(_HOST)], None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.decode("ascii"), private.decode("ascii")

"""Each kind of use of a secret: a rule, a value, and the texts that reveal it. For tests that are about all of them."""

import base64
import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from policy.compile import compile_named
from policy.compiled import CompiledPolicy
from policy.facts import Scheme
from policy.load import load_text
from tests.client_certificates import Times, authority

HOST = "good.test"
DAY = "20260102"


@dataclass(frozen=True)
class Kind:
    """One kind. `use` is what a rule says of it, without the secret's name; `revealing` are texts by their name."""

    name: str
    use: str
    value: str
    revealing: dict[str, bytes]
    port: int = 443
    scheme: Scheme = Scheme.HTTPS
    key: str = "inject"
    names: tuple[str, ...] = ("sealed-name", "env://A_NAME", "vault://kv/agents/a#token")
    """The names under which a test uses a secret of this kind."""

    def rule(self, secret: str) -> str:
        """Return a rule in YAML's flow style."""
        use = self.use.replace("SECRET", f'"{secret}"')
        postgres = ", schemes: [postgres], databases: [d]" if self.scheme is Scheme.POSTGRES else ""
        return f"{{id: {self.name}, host: {HOST}{postgres}, {self.key}: {use}}}"

    def policy(self, secret: str) -> CompiledPolicy:
        """Return a policy with this rule alone."""
        return compile_named(load_text(document(self.rule(secret))), "p")


def document(*rules: str) -> str:
    """Return a policy file with one policy `p`."""
    lines = "".join(f"      - {rule}\n" for rule in rules)
    return f"version: 1\npolicies:\n  p:\n    rules:\n{lines}"


def b64(text: str | bytes) -> bytes:
    return base64.b64encode(text.encode() if isinstance(text, str) else text)


TOKEN, PASSWORD = "tok/en+3v4l-UE_9~x", "p4ss/wo+rd~LONG_9"
SESSION = "IQoJb3JpZ2luX2VjEJr//////////wEaCXVzLWVhc3Qt"
ACCESS = "s3cr3t/K7MDENG+bPxRfiCY"
HASHED = b"\x00\xffkey of the service\x80"
SIGNED = "eyJhbGciOiJFZERTQSJ9.eyJpc3MiOiJpc3N1ZXIifQ.Zm9yLW9uZS1zaWduYXR1cmUtb25seQ"
LOGIN = f"v-approle-agents-ro-x:{PASSWORD}"
_TODAY = datetime(2026, 1, 2, tzinfo=UTC)
_CERTIFICATE = authority("kinds").issue("client", times=Times(_TODAY - timedelta(1), _TODAY + timedelta(1)))


def _signing_key() -> bytes:
    key = b"AWS4" + ACCESS.encode()
    for part in (DAY, "eu-west-1", "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key


def _private() -> dict[str, bytes]:
    numbers = _CERTIFICATE.key.private_numbers()  # type: ignore[union-attr]
    raw = numbers.private_value.to_bytes(32)  # type: ignore[union-attr]
    jwk = base64.urlsafe_b64encode(raw).rstrip(b"=")
    return {"number in hexadecimal": raw.hex().encode(), "JWK": b'{"d":"%b"}' % jwk}


_TOKEN = {"value": TOKEN.encode(), "header": f"Bearer {TOKEN}".encode(), "base64": b64(TOKEN)}
_LOGIN = {"password": PASSWORD.encode(), "login": LOGIN.encode(), "Basic": b"Basic " + b64(LOGIN)}
_KEYS = {"key": ACCESS.encode(), "signing key": _signing_key().hex().encode(), "in base64": b64(_signing_key())}
DYNAMIC = ("vault://database/creds/ro#username:password",)

KINDS = [
    Kind("bearer", "{secret: SECRET, as: bearer}", TOKEN, _TOKEN),
    Kind("api-key", "{secret: SECRET, as: api-key, header: X-Api-Key}", f"Token {TOKEN}", _TOKEN),
    Kind("basic", "{secret: SECRET, as: basic}", LOGIN, _LOGIN),
    Kind("basic-user", "{secret: SECRET, as: basic, username: v-approle-agents-ro-x}", PASSWORD, _LOGIN),
    Kind("basic-raw", "{secret: SECRET, as: basic-raw}", b64(LOGIN).decode(), _LOGIN),
    Kind(
        "query", "{secret: SECRET, as: query, name: key}", TOKEN, {"escaped": b"?key=tok%2Fen%2B3v4l-UE_9~x", **_TOKEN}
    ),
    Kind(
        "cookie", "{secret: SECRET, as: cookie, name: sid}", TOKEN, {"cookie": f"sid={TOKEN}; a=b".encode(), **_TOKEN}
    ),
    Kind(
        "substitution",
        "[{secret: SECRET, placeholder: __TOKEN__, in: [header, query, body]}]",
        TOKEN,
        {"JSON": TOKEN.replace("/", "\\/").encode(), **_TOKEN},
        key="substitutions",
    ),
    Kind("placeholder", '{secret: SECRET, as: bearer, env: {TOKEN: "{placeholder}"}}', TOKEN, _TOKEN),
    Kind(
        "aws-sigv4", "{secret: SECRET, as: aws-sigv4, region: eu-west-1, service: s3}", f"AKIDEXAMPLE:{ACCESS}", _KEYS
    ),
    Kind(
        "aws-session",
        "{secret: SECRET, as: aws-sigv4, region: eu-west-1, service: s3}",
        f"AKIDEXAMPLE:{ACCESS}:{SESSION}",
        {"session token": SESSION.encode(), **_KEYS},
    ),
    Kind(
        "hmac",
        '{secret: SECRET, as: hmac, header: X-Signature, sign: "{path}", key: base64}',
        b64(HASHED).decode(),
        {"key": b64(HASHED), "hexadecimal": HASHED.hex().encode()},
    ),
    Kind("client-certificate", "{secret: SECRET, as: client-certificate}", _CERTIFICATE.value, _private()),
    Kind("postgres", "{secret: SECRET, as: postgres}", LOGIN, _LOGIN, 5432, Scheme.POSTGRES),
    # Derived values: tokens that the fetcher obtains, and accounts that Vault makes.
    Kind("oauth", "{secret: SECRET, as: bearer}", TOKEN, _TOKEN, names=("token://crm",)),
    Kind(
        "jwt",
        "{secret: SECRET, as: bearer}",
        SIGNED,
        {"token": SIGNED.encode(), "signature": SIGNED.rpartition(".")[2].encode()},
        names=("token://search", "sealed-name"),
    ),
    Kind("account-basic", "{secret: SECRET, as: basic}", LOGIN, _LOGIN, names=DYNAMIC),
    Kind("account-header", "{secret: SECRET, as: api-key, header: X-Login}", LOGIN, _LOGIN, names=DYNAMIC),
    Kind("account-postgres", "{secret: SECRET, as: postgres}", LOGIN, _LOGIN, 5432, Scheme.POSTGRES, names=DYNAMIC),
]

"""The interface of what signs a request, for `gateway.exchange`. Pure.

- A request has at most one signature. It is made last: over the head as it is sent, after every injection and
  substitution.
- A signer reads the client's request before a secret is leased. It gets the secret for the call of `sign` only; the
  signer of an upload in chunks then has the signing key of the day until the upload ends.
"""

from typing import Protocol

from gateway.signing.aws import AwsSigner, signing_keys
from gateway.signing.hmac_text import HmacSigner, hmac_key
from gateway.signing.sigv4 import SigningRefused, read_keys
from gateway.translate import Headers
from gateway.verdicts import ForwardHead
from policy.facts import RequestFacts
from policy.injection import InjectionPlan


class Signer(Protocol):
    """Signs one request.

    Attributes:
        needs_body: the body is collected, and given to `sign`.
    """

    needs_body: bool

    def without_signature(self, target: bytes, headers: Headers) -> tuple[bytes, Headers]:
        """Return target and headers without what the client sent in the places of the signature."""
        ...

    def sign(self, secret: str, head: ForwardHead, now: float, body: bytes | None) -> ForwardHead:
        """Return the signed head. The engine must not change what it covers.

        Args:
            secret: the text of the secret.
            head: the head to send, with every other injection.
            now: seconds since 1970.
            body: the collected body as it is sent; None if it was not collected.

        Raises:
            SigningRefused: the request cannot be signed, or not with this secret.
        """
        ...

    def chunk(self, data: bytes) -> bytes:
        """Take bytes of a body that was not collected, after `sign`; return those to send.

        Raises:
            SigningRefused: the body has no valid form. Nothing more of it may be sent.
        """
        ...

    def end(self) -> None:
        """Take the end of such a body.

        Raises:
            SigningRefused: it is incomplete.
        """
        ...


def signer_of(plan: InjectionPlan, facts: RequestFacts, headers: Headers, *, http2: bool) -> Signer:
    """Return the signer of a request. `headers` are those of the client.

    Raises:
        SigningRefused: the request cannot be signed.
    """
    if plan.aws is not None:
        return AwsSigner(plan.aws, facts, headers, http2=http2)
    if plan.hmac is not None:
        return HmacSigner(plan.hmac, facts)
    raise RuntimeError("a plan that does not sign")


def check_key(plan: InjectionPlan, secret: str) -> None:
    """Check that a secret can sign.

    Raises:
        SigningRefused: it has another form. The message does not contain a part of it.
    """
    if plan.aws is not None:
        read_keys(secret)
    elif plan.hmac is not None:
        hmac_key(plan.hmac.key, secret)


def signing_texts(plan: InjectionPlan, secret: str, host: str, now: float) -> frozenset[str | bytes]:
    """Return the values that reveal the secret of a signature, and the keys that are derived from it at `now`.

    An access key id is no secret: each signature shows it.
    """
    try:
        if plan.aws is not None:
            keys = read_keys(secret)
            token = () if keys.session_token is None else (keys.session_token,)
            return frozenset((keys.secret_access_key, *token, *signing_keys(plan.aws, keys, host, now)))
        if plan.hmac is not None:
            key = hmac_key(plan.hmac.key, secret)
            return frozenset((secret, key.decode("ascii") if key.isascii() else key))
    except SigningRefused:  # it signs nothing, and is not sent
        return frozenset((secret,))
    raise RuntimeError("a plan that does not sign")


def is_sent(plan: InjectionPlan, secret: str) -> bool:
    """Whether a part of the secret of a signature is sent with it: the token of an AWS session."""
    try:
        return plan.aws is not None and read_keys(secret).session_token is not None
    except SigningRefused:
        return False

"""Signs one request with a keyed hash over a text that the rule describes.

- The text is put together from the request as it is sent: its method, host, target, headers and body.
- A header that the text contains is there exactly once; otherwise the request is refused.
- The key never leaves this module but as the key of the hash.

Pure. `gateway.signing.signer` has the interface.
"""

import base64
import binascii
import hashlib
import hmac

from gateway.inject import inject, slot
from gateway.signing.sigv4 import SigningRefused
from gateway.translate import Headers
from gateway.verdicts import ForwardHead
from policy.facts import RequestFacts
from policy.signing import (
    HmacSigning,
    KeyForm,
    PartKind,
    SignatureForm,
    TemplatePart,
    TimestampForm,
    message_parts,
    value_parts,
)


class HmacSigner:
    """See `gateway.signing.signer.Signer`."""

    def __init__(self, signing: HmacSigning, facts: RequestFacts) -> None:
        self._signing = signing
        self._method = facts.method
        self._message = message_parts(signing.message)
        self._value = value_parts(signing.value)
        self.needs_body = signing.signs_body

    def sign(self, secret: str, head: ForwardHead, now: float, body: bytes | None) -> ForwardHead:
        """See `gateway.signing.signer.Signer`."""
        signing, key = self._signing, hmac_key(self._signing.key, secret)
        timestamp = str(int(now * 1000) if signing.timestamp is TimestampForm.MILLISECONDS else int(now))
        text = b"".join([self._part(part, head, timestamp, body) for part in self._message])
        digest = hmac.digest(key, text, signing.algorithm.value)
        written = digest.hex() if signing.output is SignatureForm.HEX else base64.b64encode(digest).decode("ascii")
        shown = {PartKind.SIGNATURE: written, PartKind.TIMESTAMP: timestamp}
        value = "".join([shown.get(part.kind, part.argument) for part in self._value])
        headers = [(signing.header, value)]
        if signing.timestamp_header is not None:
            headers.append((signing.timestamp_header, timestamp))
        if head.authority:
            headers = [(name.lower(), text) for name, text in headers]
        return ForwardHead(head.target, head.authority, inject(head.headers, headers))

    def without_signature(self, target: bytes, headers: Headers) -> tuple[bytes, Headers]:
        """See `gateway.signing.signer.Signer`."""
        return target, tuple(one for one in headers if slot(one[0]) not in self._signing.claims)

    def chunk(self, data: bytes) -> bytes:
        """See `gateway.signing.signer.Signer`."""
        return data

    def end(self) -> None:
        """See `gateway.signing.signer.Signer`."""

    def _part(self, part: TemplatePart, head: ForwardHead, timestamp: str, body: bytes | None) -> bytes:
        path, _, query = head.target.partition(b"?")
        match part.kind:
            case PartKind.TEXT:
                return part.argument.encode()
            case PartKind.METHOD:
                return self._method.encode("ascii")
            case PartKind.HOST:
                return head.authority or _single(head, "host")
            case PartKind.PATH:
                return path
            case PartKind.QUERY:
                return query
            case PartKind.TARGET:
                return head.target
            case PartKind.BODY:
                return _collected(body)
            case PartKind.BODY_SHA256:
                return hashlib.sha256(_collected(body)).hexdigest().encode("ascii")
            case PartKind.TIMESTAMP:
                return timestamp.encode("ascii")
            case PartKind.HEADER:
                return _single(head, part.argument.replace("_", "-"))
        raise RuntimeError("a part of a text that cannot be signed")


def hmac_key(form: KeyForm, text: str) -> bytes:
    """Return the key that the text of a secret contains.

    Raises:
        SigningRefused: the text has another form. The message does not contain a part of it.
    """
    if form is KeyForm.RAW:
        return text.encode()
    try:
        return base64.b64decode(text, validate=True) if form is KeyForm.BASE64 else bytes.fromhex(text)
    except (ValueError, binascii.Error):
        raise SigningRefused(f"the secret is not a key in {form.value}") from None


def _collected(body: bytes | None) -> bytes:
    if body is None:
        raise RuntimeError("a body that is signed was not collected")
    return body


def _single(head: ForwardHead, name: str) -> bytes:
    found = [value for key, value in head.headers if slot(key) == name]
    if len(found) != 1:
        raise SigningRefused(f"the signature covers the header {name}, which the request must have once")
    return found[0]

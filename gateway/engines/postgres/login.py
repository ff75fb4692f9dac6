"""The login at a PostgreSQL server, from the startup packet to the first `ReadyForQuery`. Sans-IO.

    login = Login(...)           -> bytes to send: `opening`
    login.receive(message)       -> bytes to send next; None while there are none
    login.challenge, login.answer: between them the caller derives the salted password
    login.ready                  -> `welcome`: what the client gets

- The only accepted way is SCRAM-SHA-256, with or without channel binding, up to the server's verified signature. A
  server that asks for the password itself (cleartext, MD5), or for nothing, ends the login: no password is sent.
- The client gets nothing of the server before the login is complete. It then gets the server's settings and notices,
  and a cancel key of the gateway in place of the server's.
- The server's messages are limited in size and number. An unknown one ends the login.
"""

from dataclasses import dataclass

from gateway.engines.postgres.scram import Challenge, Scram, ScramFailed
from gateway.startup import Startup, message, negotiated, startup_packet

MAX_MESSAGE = 64 * 1024
MAX_WELCOME = 256 * 1024
MAX_MESSAGES = 512
_HEADER = 5
_OK, _CLEARTEXT, _MD5, _SASL, _SASL_CONTINUE, _SASL_FINAL = 0, 3, 5, 10, 11, 12
_REFUSED = {_CLEARTEXT: "the password in the clear", _MD5: "an MD5 hash of the password", 7: "GSSAPI", 9: "SSPI"}
_TOLD = "CMDH"


class LoginFailed(Exception):
    """The login failed. The text is the reason, a sentence of the gateway."""


class ServerRefused(Exception):
    """The server ended the login with an error. `fields` are its SQLSTATE, message, detail and hint by field type."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__("the server refused the login")
        self.fields = fields


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the server: its type, its body, and its length with its header."""

    kind: bytes
    body: bytes
    length: int


def read_message(data: bytes | bytearray) -> Message | None:
    """Return the message at the start of `data`, None if it is not complete.

    Raises:
        LoginFailed: it is too long.
    """
    if len(data) < _HEADER:
        return None
    length = int.from_bytes(data[1:_HEADER])
    if not 4 <= length <= MAX_MESSAGE:
        raise LoginFailed("a message of the server has an invalid length")
    if len(data) < length + 1:
        return None
    return Message(bytes(data[:1]), bytes(data[_HEADER : length + 1]), length + 1)


class Login:
    """One login.

    Attributes:
        opening: the bytes that begin it.
        challenge: set when the server has sent its salt; the caller then calls `answer`.
        key: the server's cancel key; None if it has sent none.
        ready: the login is complete.
    """

    def __init__(self, startup: Startup, user: str, certificate_hash: bytes | None, nonce: str) -> None:
        self.opening = startup_packet(user, startup.database, startup.parameters)
        self.challenge: Challenge | None = None
        self.key: bytes | None = None
        self.ready = False
        self._startup = startup
        self._hash = certificate_hash
        self._nonce = nonce
        self._scram: Scram | None = None
        self._challenged = False
        self._proved = False
        self._open = False
        self._messages = 0
        self._before = bytearray()
        self._after = bytearray()

    def welcome(self, key: bytes | None) -> bytes:
        """Return what the client gets for a complete login, with its own cancel key."""
        if not self.ready:
            raise RuntimeError("the login is not complete")
        first = b""
        if self._startup.minor or self._startup.options:
            first = negotiated(self._startup.options)
        keyed = b"" if key is None else message(b"K", key)
        return first + message(b"R", _OK.to_bytes(4)) + bytes(self._before) + keyed + bytes(self._after)

    def receive(self, received: Message) -> bytes | None:
        """Take one message of the server; return what to send next.

        Raises:
            LoginFailed: the login must end. Nothing more is sent.
            ServerRefused: the server has ended it.
        """
        self._messages += 1
        if self.ready or self._messages > MAX_MESSAGES:
            raise LoginFailed("the server sent too many messages before the session was ready")
        match received.kind:
            case b"E":
                raise ServerRefused(_fields(received.body))
            case b"R":
                return self._authentication(received.body)
            case b"N" | b"S" | b"K" | b"Z" if self._open:
                self._settle(received)
            case b"N":
                pass  # a notice before the login: the client does not get it
            case _:
                raise LoginFailed("the server sent an unexpected message before the session was ready")
        return None

    def answer(self, salted: bytes) -> bytes:
        """Return the message that answers the challenge."""
        challenge, self.challenge = self.challenge, None
        if self._scram is None or challenge is None:
            raise RuntimeError("there is no challenge to answer")
        return message(b"p", self._scram.final(challenge, salted))

    def _authentication(self, body: bytes) -> bytes | None:
        if len(body) < 4 or self._open:
            raise LoginFailed("the server's authentication message is malformed")
        kind, rest = int.from_bytes(body[:4]), body[4:]
        try:
            if kind == _SASL and self._scram is None:
                scram = self._scram = Scram(_mechanisms(rest), self._hash, self._nonce)
                name = scram.mechanism.encode() + b"\0"
                return message(b"p", name + len(scram.first).to_bytes(4) + scram.first)
            if kind == _SASL_CONTINUE and self._scram is not None and not self._challenged:
                self._challenged = True  # once: each proof lets a server try passwords
                self.challenge = self._scram.challenge(rest)
                return None
            if kind == _SASL_FINAL and self._scram is not None and not self._proved:
                self._scram.verify(rest)
                self._proved = True
                return None
        except ScramFailed as failed:
            raise LoginFailed(str(failed)) from None
        if kind == _OK and not rest and self._proved:
            self._open = True
            return None
        if kind == _OK:
            raise LoginFailed("the server opened the session without a SCRAM login, so it has proved nothing")
        asked = _REFUSED.get(kind, "another way to log in")
        raise LoginFailed(f"the server asks for {asked}; the gateway logs in with SCRAM-SHA-256 only")

    def _settle(self, received: Message) -> None:
        whole = message(received.kind, received.body)
        if received.kind == b"K":
            if self.key is not None or not 8 <= len(received.body) <= 260:
                raise LoginFailed("the server's cancel key is malformed")
            self.key = received.body
            return
        if len(self._before) + len(self._after) + len(whole) > MAX_WELCOME:
            raise LoginFailed("the server sent too much before the session was ready")
        (self._before if self.key is None else self._after).extend(whole)
        if received.kind == b"Z" and received.body != b"I":
            raise LoginFailed("the server's session does not begin idle")
        self.ready = received.kind == b"Z"


def _mechanisms(data: bytes) -> list[str]:
    if not data.endswith(b"\0\0") or not data.isascii():
        raise LoginFailed("the server's list of SASL mechanisms is malformed")
    return data[:-2].decode("ascii").split("\0")


def _fields(body: bytes) -> dict[str, str]:
    """Return the fields of an error that a client may see; an empty text where the server sends something else."""
    found: dict[str, str] = {}
    for part in body.split(b"\0"):
        name, text = part[:1].decode("ascii", "replace"), part[1:].decode("utf-8", "replace")
        if name and name in _TOLD and name not in found:
            found[name] = "".join(character if character.isprintable() else " " for character in text[:1000])
    if len(found.get("C", "")) != 5 or not found["C"].isalnum():
        found["C"] = "08006"
    return found

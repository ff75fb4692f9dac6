"""The login at a server, message by message: what the gateway sends, and every server at which it does not log in."""

import base64
import hashlib
import hmac

import pytest

from gateway.engines.postgres.login import MAX_MESSAGE, MAX_MESSAGES, Login, LoginFailed, ServerRefused, read_message
from gateway.engines.postgres.scram import derive
from gateway.startup import Startup, message

PASSWORD, SALT, ROUNDS = "canary-of-the-login", b"sixteen bytes...", 4096
STARTUP = Startup(0, "ledger", (("timezone", "UTC"),), (), 0)
KEY = b"\0\0\0\x07serv"
OK, READY = message(b"R", bytes(4)), message(b"Z", b"I")


def asks(kind: int, body: bytes = b"") -> bytes:
    return message(b"R", kind.to_bytes(4) + body)


OFFER = asks(10, b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0")


class Talk:
    """A login, and a server that knows the password's verifier."""

    def __init__(self, startup: Startup = STARTUP, certificate: bytes | None = b"hash") -> None:
        self.login = Login(startup, "app", certificate, "nonce-of-the-client")
        self.sent = [self.login.opening]
        self.final = b""

    def hear(self, data: bytes) -> bytes | None:
        """Take one message of the server, and derive the password if it is the challenge."""
        received = read_message(data)
        assert received is not None
        assert len(data) == received.length
        answer = self.login.receive(received)
        if self.login.challenge is not None:
            answer = self.login.answer(derive(PASSWORD, self.login.challenge))
        if answer is not None:
            self.sent.append(answer)
        return answer

    def challenge(self, rounds: int = ROUNDS) -> bytes:
        return asks(11, f"r=nonce-of-the-client+more,s={base64.b64encode(SALT).decode()},i={rounds}".encode())

    def proved(self) -> bytes:
        """Go on to the server's last message of SCRAM; check the proof; return that message."""
        first = self.hear(OFFER)
        assert first is not None
        bare = first.partition(b",,")[2]
        asked = self.challenge()
        last = self.hear(asked)
        assert last is not None
        without, _, proof = last[5:].rpartition(b",p=")
        everything = b",".join((bare, asked[9:], without))
        salted = hashlib.pbkdf2_hmac("sha256", PASSWORD.encode(), SALT, ROUNDS)
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        stored = hashlib.sha256(client_key).digest()
        signature = hmac.digest(stored, everything, "sha256")
        assert client_key == bytes(a ^ b for a, b in zip(base64.b64decode(proof), signature, strict=True))
        server_key = hmac.digest(salted, b"Server Key", "sha256")
        return asks(12, b"v=" + base64.b64encode(hmac.digest(server_key, everything, "sha256")))


def test_a_login_gives_the_client_the_settings_and_another_key() -> None:
    talk = Talk()
    assert talk.hear(talk.proved()) is None
    setting, notice = message(b"S", b"server_version\x0015.4\0"), message(b"N", b"SNOTICE\0\0")
    for data in (OK, setting, message(b"K", KEY), notice):
        assert talk.hear(data) is None
        assert not talk.login.ready
    talk.hear(READY)
    assert talk.login.ready
    assert KEY == talk.login.key
    own = b"\0\0\0\1mine"
    assert OK + setting + message(b"K", own) + notice + READY == talk.login.welcome(own)
    assert KEY not in talk.login.welcome(own)


def test_the_server_never_gets_the_password() -> None:
    talk = Talk()
    talk.hear(talk.proved())
    everything = b"".join(talk.sent)
    assert PASSWORD.encode() not in everything
    assert b"user\0app\0database\0ledger\0timezone\0UTC\0" in everything


def test_a_client_with_a_newer_protocol_is_told_the_version() -> None:
    talk = Talk(Startup(2, "ledger", (), ("_pq_.x",), 0))
    talk.hear(talk.proved())
    for data in (OK, READY):
        talk.hear(data)
    assert talk.login.welcome(None).startswith(b"v\0\0\0\x13\0\3\0\0\0\0\0\1_pq_.x\0R")
    assert b"\0\3\0\0" == talk.sent[0][4:8]


PROVES_NOTHING = {
    "no login at all": OK,
    "the password": asks(3),
    "an MD5 hash": asks(5, b"salt"),
    "GSSAPI": asks(7),
    "SSPI": asks(9),
    "an unknown way": asks(99),
    "another mechanism": asks(10, b"OAUTHBEARER\0\0"),
    "no mechanism": asks(10, b"\0\0"),
    "a broken list": asks(10, b"SCRAM-SHA-256"),
    "a challenge without an offer": asks(11, b"r=x"),
    "a signature without a proof": asks(12, b"v=AAAA"),
    "settings": message(b"S", b"a\0b\0"),
    "ready": READY,
    "a key": message(b"K", KEY),
    "rows": message(b"D", b"\0\0"),
    "a negotiation": message(b"v", bytes(8)),
    "nothing": message(b"R", b""),
}


@pytest.mark.parametrize("case", PROVES_NOTHING)
def test_a_server_that_proves_nothing_gets_nothing(case: str) -> None:
    talk = Talk()
    with pytest.raises(LoginFailed):
        talk.hear(PROVES_NOTHING[case])
    assert [talk.login.opening] == talk.sent
    with pytest.raises(RuntimeError):
        talk.login.welcome(None)


@pytest.mark.parametrize("data", [OFFER, OK, asks(3), asks(5, b"salt"), READY])
def test_a_server_cannot_change_its_mind_after_the_offer(data: bytes) -> None:
    talk = Talk()
    talk.hear(OFFER)
    with pytest.raises(LoginFailed):
        talk.hear(data)
    assert 2 == len(talk.sent)


def test_a_server_gets_one_proof() -> None:
    talk = Talk()
    talk.proved()
    with pytest.raises(LoginFailed):
        talk.hear(talk.challenge())
    assert 3 == len(talk.sent)


def test_a_wrong_signature_ends_the_login() -> None:
    talk = Talk()
    talk.proved()
    with pytest.raises(LoginFailed):
        talk.hear(asks(12, b"v=" + base64.b64encode(bytes(32))))
    talk = Talk()
    talk.proved()
    with pytest.raises(LoginFailed, match="without a SCRAM login"):
        talk.hear(OK)


def test_a_server_cannot_log_in_twice_or_open_in_a_transaction() -> None:
    for data in (OK, OFFER, message(b"Z", b"T"), message(b"K", b"short"), message(b"D", b"")):
        talk = Talk()
        talk.hear(talk.proved())
        talk.hear(OK)
        with pytest.raises(LoginFailed):
            talk.hear(data)


def test_what_comes_before_the_session_is_limited() -> None:
    talk = Talk()
    talk.hear(talk.proved())
    talk.hear(OK)
    with pytest.raises(LoginFailed, match="too much"):
        for _ in range(MAX_MESSAGES):
            talk.hear(message(b"S", bytes(60_000)))
    talk = Talk()
    with pytest.raises(LoginFailed, match="too many"):
        for _ in range(MAX_MESSAGES + 1):
            talk.hear(message(b"N", b""))


@pytest.mark.parametrize("length", [0, 3, MAX_MESSAGE + 1, 1 << 31])
def test_a_message_with_a_wrong_length_ends_the_login(length: int) -> None:
    with pytest.raises(LoginFailed):
        read_message(b"R" + length.to_bytes(4))


def test_an_incomplete_message_waits() -> None:
    for cut in range(len(OFFER)):
        assert read_message(OFFER[:cut]) is None


def test_an_error_of_the_server_is_made_printable_and_short() -> None:
    fields = b"".join(
        one + b"\0"
        for one in (b"SFATAL", b"C28P01", b"Mno\nentry\x1b[2J\xff", b"D" + b"d" * 5000, b"Ffile.c", b"Msecond")
    )
    talk = Talk()
    with pytest.raises(ServerRefused) as caught:
        talk.hear(message(b"E", fields + b"\0"))
    assert {"C", "M", "D"} == set(caught.value.fields)
    assert "no entry [2J" == caught.value.fields["M"].rstrip("\ufffd ")
    assert 1000 == len(caught.value.fields["D"])


def test_an_error_without_a_valid_code_gets_one() -> None:
    for code in (b"", b"C", b"C28P0\xff", b"Ctoolong"):
        with pytest.raises(ServerRefused) as caught:
            Talk().hear(message(b"E", code + b"\0\0"))
        assert "08006" == caught.value.fields["C"]

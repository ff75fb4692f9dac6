"""The server's side of a PostgreSQL flow: one verified connection, and the login on it.

- The server must accept TLS, and its certificate is verified for the host of the flow, before anything else is sent.
- What the server sends after its answer to the TLS request goes into TLS. So nothing unencrypted is read as a message.
- The password exists only during the login.
- A failure is a `SessionRefused` with the reason for the client.
"""

import asyncio
import base64
import secrets
from collections.abc import Callable
from functools import partial

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from OpenSSL import SSL

from gateway import startup as packets
from gateway.engines.buffered import BufferedConnection
from gateway.engines.engine import Shared
from gateway.engines.port import InspectedFlow, describe
from gateway.engines.postgres.login import Login, LoginFailed, ServerRefused, read_message
from gateway.engines.postgres.scram import derive
from gateway.engines.postgres.session import Credentials, DatabaseSession, SessionRefused
from gateway.startup import Startup
from gateway.tls.contexts import POSTGRES, peer_name
from gateway.verdicts import Route
from wire.patience import Patience

ENGINE = "postgres"
BUFFER = 256 * 1024
"""The limit of received bytes of one connection that wait to be relayed."""
_NONCE = 18
_CANCEL_SECONDS = 5.0
_REFUSED_PASSWORD = ("28P01", "28000")


class DatabaseServer:
    """Connects to the destination of a flow, once.

    Attributes:
        connection: None before `connect`.
        error: why there is no session, for the record.
    """

    def __init__(
        self, flow: InspectedFlow, shared: Shared, session: DatabaseSession, moved: Callable[[], None]
    ) -> None:
        self.connection: BufferedConnection | None = None
        self.error: str | None = None
        self._flow = flow
        self._shared = shared
        self._session = session
        self._moved = moved
        self._seconds = shared.limits.handshake_seconds
        self._tls: SSL.Connection | None = None

    def discard(self) -> None:
        """End the connection now with a reset."""
        if self.connection is not None:
            self.connection.discard()

    async def connect(self) -> BufferedConnection:
        """Return a verified and recorded connection.

        Raises:
            SessionRefused: there is none.
        """
        flow, shared = self._flow, self._shared
        try:
            async with Patience(3 * self._seconds):
                reader, writer, address = await shared.dialler.dial(
                    flow.host, flow.port, flow.scheme, describe(flow, ENGINE)
                )
        except OSError as error:
            raise self._failed(f"The gateway cannot reach {flow.host}: {error}.") from None
        except Exception:  # noqa: BLE001 - fails closed: the log did not accept the address
            raise self._failed("The gateway's audit log takes no records now.", packets.UNAVAILABLE) from None
        try:
            self._check_over()
            async with Patience(self._seconds):
                writer.write(packets.SSL_REQUEST)
                if await reader.readexactly(1) != packets.ACCEPTED:
                    raise self._failed(f"The server {flow.host} does not offer TLS, so the gateway does not log in.")
                tls = self._tls = shared.upstream.connect(flow.host, [POSTGRES])
                connection = await BufferedConnection.over(reader, writer, BUFFER, self._moved, tls=tls)
                self.connection = connection
                await connection.secure()
            route = Route(address, peer_name(tls, flow.host))
        except (OSError, EOFError, ValueError):
            writer.transport.abort()
            self._check_over()
            text = f"The server has no TLS with a certificate for {flow.host} that the gateway trusts."
            raise self._failed(text) from None
        except BaseException:
            writer.transport.abort()
            raise
        await self._session.connection(route)
        return connection

    async def login(self, startup: Startup) -> Login:
        """Log in; return the complete login.

        Raises:
            SessionRefused: it failed.
        """
        connection, tls = self.connection, self._tls
        if connection is None or tls is None:
            raise RuntimeError("a login without a verified connection")
        credentials = await self._session.credentials()
        nonce = base64.b64encode(secrets.token_bytes(_NONCE)).decode()
        login = Login(startup, credentials.user, certificate_hash(tls), nonce)
        try:
            async with Patience(3 * self._seconds):
                await self._exchange(connection, login, credentials)
        except LoginFailed as failed:
            raise self._failed(f"The gateway does not log in at the server: {failed}.") from None
        except ServerRefused as refused:
            raise self._refused(refused) from None
        except OSError as error:
            self._check_over()
            raise self._failed(f"The server ended the login ({type(error).__name__}).") from None
        return login

    async def cancel(self, key: bytes) -> None:
        """Send a cancel request. The server answers with the end of the connection."""
        connection = self.connection
        if connection is None:
            raise RuntimeError("a cancel request without a verified connection")
        connection.write(packets.cancel_packet(key))
        async with Patience(_CANCEL_SECONDS):
            while await connection.fill():
                connection.data.clear()

    async def _exchange(self, connection: BufferedConnection, login: Login, credentials: Credentials) -> None:
        connection.write(login.opening)
        while not login.ready:
            received = read_message(connection.data)
            if received is None:
                if not await connection.fill():
                    raise ConnectionResetError("the server ended the connection")
                continue
            del connection.data[: received.length]
            answer = login.receive(received)
            if login.challenge is not None:
                # It takes up to a second, so it has a thread.
                work = partial(derive, credentials.password.reveal(), login.challenge)
                salted = await asyncio.get_running_loop().run_in_executor(None, work)
                self._check_over()
                answer = login.answer(salted)
            if answer is not None:
                connection.write(answer)

    def _failed(self, text: str, code: str = packets.UNREACHABLE) -> SessionRefused:
        self.error = text
        return SessionRefused(packets.error(code, text))

    def _refused(self, refused: ServerRefused) -> SessionRefused:
        fields = refused.fields
        code, hint = fields["C"], fields.get("H", "")
        text = ": ".join(fields[name] for name in "MD" if fields.get(name)) or "the server refused the session"
        if code in _REFUSED_PASSWORD:
            names = ", ".join(sorted(self._session.used))
            hint = f"The gateway logs in with secret {names}. Ask the operator of this sandbox to check its value."
        self.error = f"the server refused the session: {code}"
        return SessionRefused(packets.error(code, text, hint))

    def _check_over(self) -> None:
        if self._session.over:
            raise ConnectionAbortedError


def certificate_hash(tls: SSL.Connection) -> bytes | None:
    """Return what a login is bound to (RFC 5929), None if the certificate's signature has no hash."""
    certificate: x509.Certificate | None = tls.get_peer_certificate(as_cryptography=True)
    if certificate is None:
        raise ConnectionError("the server has no certificate")
    algorithm = certificate.signature_hash_algorithm
    if algorithm is None:
        return None
    if isinstance(algorithm, hashes.MD5 | hashes.SHA1):
        algorithm = hashes.SHA256()
    digest = hashes.Hash(algorithm)
    digest.update(certificate.public_bytes(serialization.Encoding.DER))
    return digest.finalize()

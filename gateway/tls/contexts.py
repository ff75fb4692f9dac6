"""OpenSSL contexts for both sides of an inspected TLS flow. mitmproxy's own contexts are not used.

- Upstream: TLS 1.2 or later. The server's chain is verified against the operator's roots only. Its name is verified
  against the host, without common names and partial wildcards. No setting turns this off.
- Client: a leaf for the host of the flow. HTTP/1.1 if the client offers it, otherwise HTTP/2, otherwise no handshake.
  For a server that speaks only HTTP/2 the order is the other one. A database client gets `postgresql` if it offers a
  protocol at all.
- A client can resume a session of TLS 1.3 by a ticket. The keys of tickets belong to one leaf, and exist only in the
  worker's memory. So a session is resumed only for the same host in the same sandbox, and not after the leaf was
  replaced. The name, the protocol and each request of a resumed session are judged like those of a new one. There is no
  early data. TLS 1.2 has no tickets, because they would end its forward secrecy.
- Upstream no session is resumed, so each connection verifies the server's certificate.
- A client certificate is presented on the connection that asks for it only. OpenSSL sends it, and signs with its key,
  after the server's certificate is verified, in TLS 1.2 and 1.3. It is never a file. After the handshake a server
  cannot ask for one.
- No compression, no renegotiation, no session cache.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from OpenSSL import SSL, crypto

from gateway.engines.port import Leaf
from gateway.presented import Presented

CACHE = 256
_CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20"
_OP_NO_RENEGOTIATION = 1 << 30
_X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS = 0x4
_X509_CHECK_FLAG_NEVER_CHECK_SUBJECT = 0x20
_OPTIONS = SSL.OP_NO_COMPRESSION | SSL.OP_CIPHER_SERVER_PREFERENCE | _OP_NO_RENEGOTIATION
_SESSION_ID_CONTEXT = b"sallyport"
POSTGRES = b"postgresql"
_HTTP1_FIRST = (b"http/1.1", b"h2")
_HTTP2_FIRST = (b"h2", b"http/1.1")


def choose_alpn(offered: tuple[bytes, ...] | list[bytes], *, http2: bool) -> bytes | None:
    """Return the protocol for a client, None if it offers no supported one. `http2`: HTTP/2 goes first."""
    return _first(_HTTP2_FIRST if http2 else _HTTP1_FIRST, offered)


def _first(protocols: tuple[bytes, ...], offered: tuple[bytes, ...] | list[bytes]) -> bytes | None:
    return next((protocol for protocol in protocols if protocol in offered), None)


def _select_alpn(connection: SSL.Connection, offered: list[bytes]) -> bytes:
    chosen = _first(connection.get_app_data(), offered)
    if chosen is None:
        raise ValueError("the client offers no protocol of this flow")  # pyOpenSSL turns this into a fatal alert
    return chosen


def _limit_tickets(connection: SSL.Connection) -> None:
    """Issue no tickets below TLS 1.3. OpenSSL calls this when the version of a handshake is known."""
    if connection.get_protocol_version() < SSL.TLS1_3_VERSION:
        connection.set_options(SSL.OP_NO_TICKET)


def _context(method: int) -> SSL.Context:
    context = SSL.Context(method)
    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_options(_OPTIONS)
    context.set_cipher_list(_CIPHERS)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    return context


class ClientContexts:
    """Makes server ends of handshakes with the sandbox. Keeps a limited number of contexts."""

    def __init__(self) -> None:
        self._cache: OrderedDict[Leaf, SSL.Context] = OrderedDict()

    def accept(self, leaf: Leaf, *, http2: bool) -> SSL.Connection:
        """Return a connection before its handshake, which presents `leaf`. `http2`: see `choose_alpn`."""
        return self._accept(leaf, _HTTP2_FIRST if http2 else _HTTP1_FIRST)

    def accept_database(self, leaf: Leaf) -> SSL.Connection:
        """Return a connection before its handshake, for a PostgreSQL client."""
        return self._accept(leaf, (POSTGRES,))

    def _accept(self, leaf: Leaf, protocols: tuple[bytes, ...]) -> SSL.Connection:
        context = self._cache.get(leaf)
        if context is None:
            context = _context(SSL.TLS_SERVER_METHOD)
            context.set_session_id(_SESSION_ID_CONTEXT)
            context.set_tlsext_servername_callback(_limit_tickets)
            first, *others = x509.load_pem_x509_certificates(leaf.chain_pem)
            key: Any = serialization.load_pem_private_key(leaf.key_pem, password=None)
            context.use_certificate(first)
            context.use_privatekey(key)
            for other in others:
                context.add_extra_chain_cert(other)
            context.set_alpn_select_callback(_select_alpn)
            self._cache[leaf] = context
            while len(self._cache) > CACHE:
                self._cache.popitem(last=False)
        self._cache.move_to_end(leaf)
        connection = SSL.Connection(context)
        connection.set_app_data(protocols)
        connection.set_accept_state()
        return connection


class UpstreamContext:
    """Makes the client ends of handshakes with servers.

    Attributes:
        roots_pem: the certificates that it trusts.
    """

    def __init__(self, roots_pem: str) -> None:
        """Trust exactly the certificates of `roots_pem`.

        Raises:
            ValueError: `roots_pem` has no certificate, or other content.
        """
        roots = x509.load_pem_x509_certificates(roots_pem.encode("ascii"))
        self.roots_pem = roots_pem
        self._roots = [crypto.X509.from_cryptography(root) for root in dict.fromkeys(roots)]
        self._context = self._verifying()

    def _verifying(self) -> SSL.Context:
        """Return a context that verifies servers against the roots, and has no client certificate."""
        context = _context(SSL.TLS_CLIENT_METHOD)
        context.set_options(SSL.OP_NO_TICKET)
        context.set_verify(SSL.VERIFY_PEER, None)
        store = context.get_cert_store()
        if store is None:
            raise ValueError("no certificate store")
        for root in self._roots:
            store.add_cert(root)
        return context

    def connect(self, host: str, alpn: list[bytes], presented: Presented | None = None) -> SSL.Connection:
        """Return a connection before its handshake, which accepts only a certificate for `host`.

        Args:
            presented: presented if the server asks for a client certificate. Its context ends with the connection.
        """
        context = self._context
        if presented is not None:
            context = self._verifying()
            leaf, *others = presented.certificate.chain
            context.use_certificate(leaf)
            context.use_privatekey(presented.certificate.key)
            for other in others:
                context.add_extra_chain_cert(other)
        connection = SSL.Connection(context)
        name = host.encode("ascii")
        lib: Any = SSL._lib  # type: ignore[attr-defined]  # pyOpenSSL has no public call for host verification
        parameters = lib.SSL_get0_param(connection._ssl)
        lib.X509_VERIFY_PARAM_set_hostflags(
            parameters, _X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | _X509_CHECK_FLAG_NEVER_CHECK_SUBJECT
        )
        if lib.X509_VERIFY_PARAM_set1_host(parameters, name, len(name)) != 1:
            raise ValueError("host name cannot be verified")
        connection.set_tlsext_host_name(name)
        connection.set_alpn_protos(alpn)
        connection.set_connect_state()
        return connection


def certified(names: Iterable[x509.GeneralName], host: str) -> str:
    """Return the name that matches `host`, of the names in a verified server certificate: the same name or a wildcard.

    Raises:
        ValueError: no name matches, so the connection was never verified.
    """
    found = {name.value.lower() for name in names if isinstance(name, x509.DNSName)}
    for wanted in (host, f"*.{host.partition('.')[2]}"):
        if wanted in found:
            return wanted
    raise ValueError("no name in the server's certificate matches the host")


def verified(connection: SSL.Connection) -> bool:
    """Whether a complete upstream handshake verified its peer. A second check, after OpenSSL's own."""
    lib: Any = SSL._lib  # type: ignore[attr-defined]
    ok = lib.SSL_get_verify_result(connection._ssl) == 0
    modern = connection.get_protocol_version() >= SSL.TLS1_2_VERSION
    return ok and modern and connection.get_peer_certificate() is not None


def peer_name(connection: SSL.Connection, host: str) -> str:
    """Return the name of the server's certificate that matches `host`, after a complete handshake.

    Raises:
        ValueError: the certificate was not verified, or no name matches.
    """
    certificate = connection.get_peer_certificate(as_cryptography=True)
    if certificate is None or not verified(connection):
        raise ValueError("the server's certificate was not verified")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return certified(names, host)

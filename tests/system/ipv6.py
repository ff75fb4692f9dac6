"""IPv6 in the demo internet: addresses, routes, hosts, and a DNS server that the tests answer for."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dnslib import DNSRecord

from testbed.internet import Internet, in_namespace, ip
from testbed.pki import write_host_certificate
from testbed.servers import Host, RequestLog

RESOLVER = "2606:2800:222::53"
UP, NET = "2606:2800:223::1", "2606:2800:223::2"

type Answer = Callable[[str, DNSRecord, str], DNSRecord]
"""Returns the answer to a query, from the transport, the query and the address of the client."""


def connect(internet: Internet) -> None:
    """Give the upstream namespace an IPv6 address, and a route to the resolver."""
    for namespace, device, address in ((internet.up, "up0", UP), (internet.net, "net0", NET)):
        ip("-n", namespace, "-6", "addr", "add", f"{address}/64", "dev", device, "nodad")
    ip("-n", internet.up, "-6", "route", "add", f"{RESOLVER}/128", "via", NET)
    ip("-n", internet.net, "-6", "addr", "add", f"{RESOLVER}/128", "dev", "lo", "nodad")


@contextlib.contextmanager
def resolver(internet: Internet, answer: Answer) -> Iterator[None]:
    """Serve DNS at `RESOLVER`, over UDP and TCP."""

    def over_udp() -> None:
        while True:
            query, peer = udp.recvfrom(4096)
            if not query:
                return
            udp.sendto(answer("udp", DNSRecord.parse(query), peer[0]).pack(), peer)

    def over_tcp() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, peer = tcp.accept()
                with sock, sock.makefile("rb") as stream:
                    query = DNSRecord.parse(stream.read(int.from_bytes(stream.read(2))))
                    reply = bytes(answer("tcp", query, peer[0]).pack())
                    sock.sendall(len(reply).to_bytes(2) + reply)

    with (
        internet.open_socket(internet.net, socket.AF_INET6, socket.SOCK_DGRAM) as udp,
        internet.open_socket(internet.net, socket.AF_INET6, socket.SOCK_STREAM) as tcp,
    ):
        for sock in (udp, tcp):
            sock.bind((RESOLVER, 53))
        tcp.listen()
        threads = [threading.Thread(target=work) for work in (over_udp, over_tcp)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for sock in (udp, tcp):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(timeout=10)


@contextlib.contextmanager
def host(internet: Internet, name: str, *addresses: str) -> Iterator[None]:
    """Serve HTTPS for `name` at addresses of the internet. Requests are in the internet's log."""
    certificate = write_host_certificate(internet.authority, name, internet.directory)
    servers = []
    log = RequestLog(internet.request_log)
    for address in addresses:
        ip("-n", internet.net, "addr", "replace", address, "dev", "lo", *(["nodad"] if ":" in address else []))

        def made(at: str = address) -> Host:
            return Host(name, (at, 443), log, {}, Path("/nonexistent"), {}, certificate)

        servers.append(in_namespace(internet.path(internet.net), made))
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join(timeout=10)
        log.close()

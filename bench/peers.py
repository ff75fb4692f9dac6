"""The server behind all proxies of the benchmark `gateway`, and the proxies beside ours: Envoy, Squid and mitmproxy.

Each peer terminates TLS with its own certificate, sets the header with the token, verifies the server's certificate and
writes an access log. Envoy and Squid also judge the method of each request.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.fixture import PAGES, Fixture, in_namespace, wait_until
from testbed.internet import UP_ADDRESS, ip
from testbed.pki import write_host_certificate
from testbed.with_parent import with_parent

SPLICED, INSPECTED, INJECTED = PAGES
ENVOY_PORT, MITMPROXY_PORT = 8443, 8444
SQUID_PORT, _BUMP_PORT = 443, 3128  # Squid calls the port that Host names
BULK_BYTES = 1 << 30
LOGGED = "logged"
"""The first part of paths whose requests nginx writes down."""
PROXY_CORE, OTHER_CORE = 0, 1
_PAGE = "x" * 1024


def pinned(core: int, *command: str) -> list[str]:
    """Return the command that runs `command` on one processor, and ends it with this process."""
    return with_parent("taskset", "--cpu-list", str(core), *command)


@contextmanager
def nginx(fixture: Fixture) -> Iterator[Path]:
    """Run the server of all pages, on the core that it shares with the client.

    Yield the file to which it writes the paths of requests below `LOGGED`, a line each, within a second.
    """
    directory = fixture.internet.directory / "nginx"
    paths = directory / "paths.log"
    directory.mkdir()
    (directory / "bulk").touch()
    os.truncate(directory / "bulk", BULK_BYTES)
    with tempfile.TemporaryDirectory(prefix="sallyport-bench-", dir="/dev/shm") as bodies:
        servers = "".join(_server(fixture, directory, bodies, host, address) for host, address in PAGES.items())
        configuration = directory / "nginx.conf"
        configuration.write_text(
            f"""
daemon off; user root; worker_processes 1; pid {directory}/pid; error_log {directory}/error.log;
worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
  log_format path $request_uri;
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000; keepalive_timeout 600;
  client_body_temp_path {bodies}; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
  {servers}
}}
"""
        )
        log = f"{directory}/error.log"
        program = (os.environ["SALLYPORT_NGINX"], "-p", str(directory), "-e", log, "-c", str(configuration))
        with _running(fixture, in_namespace(fixture.internet, fixture.internet.net, *pinned(OTHER_CORE, *program))):
            wait_until(lambda: all(_listens(fixture, address, 443) for address in PAGES.values()), "nginx listens")
            yield paths


def _server(fixture: Fixture, directory: Path, bodies: str, host: str, address: str) -> str:
    certificate = write_host_certificate(fixture.internet.authority, host, fixture.internet.directory)
    ip("-n", fixture.internet.net, "addr", "add", f"{address}/32", "dev", "lo")
    return f"""
  server {{
    listen {address}:443 ssl; server_name {host};
    ssl_certificate {certificate}; ssl_certificate_key {certificate};
    root {directory};
    location /page {{ default_type text/plain; return 200 {_PAGE}; }}
    location /{LOGGED}/ {{
      default_type text/plain; access_log {directory}/paths.log path buffer=64k flush=1s; return 200 {_PAGE};
    }}
    location /bulk {{ }}
    location /upload {{ client_max_body_size 0; root {bodies}; dav_methods PUT; }}
  }}
"""


@contextmanager
def envoy(fixture: Fixture) -> Iterator[int]:
    """Run Envoy in the namespace from which workers dial. Yield its process id."""
    directory = fixture.internet.directory
    certificate = str(directory / f"{INJECTED}.pem")
    configuration = directory / "envoy.json"
    configuration.write_text(json.dumps(_envoy(fixture, certificate)))
    program = (
        str(Path(sys.executable).with_name("envoy")),
        "--config-path",
        str(configuration),
        "--concurrency",
        "1",
        "--disable-hot-restart",
        "--log-level",
        "error",
    )
    command = in_namespace(fixture.internet, fixture.internet.up, *pinned(PROXY_CORE, *program))
    with _running(fixture, command) as process:
        wait_until(lambda: _listens(fixture, UP_ADDRESS, ENVOY_PORT), "Envoy listens")
        yield process


def _envoy(fixture: Fixture, certificate: str) -> dict[str, object]:
    """Return Envoy's configuration: a policy, a header and an access log, as the gateway has them."""
    prefix = "type.googleapis.com/envoy.extensions"
    chain = {"filename": certificate}
    downstream = {
        "@type": f"{prefix}.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {
            "alpn_protocols": ["http/1.1"],
            "tls_certificates": [{"certificate_chain": chain, "private_key": chain}],
        },
    }
    upstream = {
        "@type": f"{prefix}.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": INJECTED,
        "common_tls_context": {
            "validation_context": {
                "trusted_ca": {"filename": str(fixture.internet.roots)},
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": INJECTED}}],
            }
        },
    }
    allowed = {
        "permissions": [
            {"header": {"name": ":method", "string_match": {"exact": method}}} for method in ("GET", "PUT")
        ],
        "principals": [{"any": True}],
    }
    manager = {
        "@type": f"{prefix}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "codec_type": "HTTP1",
        "access_log": [
            {
                "name": "file",
                "typed_config": {
                    "@type": f"{prefix}.access_loggers.file.v3.FileAccessLog",
                    "path": str(fixture.internet.directory / "envoy-access.log"),
                },
            }
        ],
        "http_filters": [
            {
                "name": "rbac",
                "typed_config": {
                    "@type": f"{prefix}.filters.http.rbac.v3.RBAC",
                    "rules": {"action": "ALLOW", "policies": {"bench": allowed}},
                },
            },
            {"name": "router", "typed_config": {"@type": f"{prefix}.filters.http.router.v3.Router"}},
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "page",
                    "domains": [INJECTED, f"{INJECTED}:*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "page", "timeout": "0s"},
                            "request_headers_to_add": [
                                {
                                    "header": {"key": "authorization", "value": f"Bearer {fixture.token}"},
                                    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
                                }
                            ],
                        }
                    ],
                }
            ]
        },
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "page",
                    "address": {"socket_address": {"address": UP_ADDRESS, "port_value": ENVOY_PORT}},
                    "filter_chains": [
                        {
                            "filters": [{"name": "http", "typed_config": manager}],
                            "transport_socket": {"name": "tls", "typed_config": downstream},
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "page",
                    "type": "STATIC",
                    "connect_timeout": "5s",
                    "circuit_breakers": {"thresholds": [{"max_connections": 4096, "max_pending_requests": 4096}]},
                    "load_assignment": {
                        "cluster_name": "page",
                        "endpoints": [
                            {
                                "lb_endpoints": [
                                    {
                                        "endpoint": {
                                            "address": {
                                                "socket_address": {"address": PAGES[INJECTED], "port_value": 443}
                                            }
                                        }
                                    }
                                ]
                            }
                        ],
                    },
                    "transport_socket": {"name": "tls", "typed_config": upstream},
                }
            ],
        }
    }


@contextmanager
def mitmproxy(fixture: Fixture) -> Iterator[int]:
    """Run the unmodified `mitmdump` as a reverse proxy, with an addon that sets the header. Yield its process id."""
    directory = fixture.internet.directory / "mitmdump"
    program = (
        str(Path(sys.executable).with_name("mitmdump")),
        "--quiet",
        f"--mode=reverse:https://{PAGES[INJECTED]}:443",
        f"--listen-host={UP_ADDRESS}",
        f"--listen-port={MITMPROXY_PORT}",
        "--set=block_global=false",  # the internet of these benchmarks looks public
        "--set=keep_host_header=true",
        "--set=stream_large_bodies=1m",
        f"--set=confdir={directory}",
        f"--set=ssl_verify_upstream_trusted_ca={fixture.internet.roots}",
        f"--scripts={Path(__file__).with_name('set_header.py')}",
    )
    command = in_namespace(fixture.internet, fixture.internet.up, *pinned(PROXY_CORE, *program))
    with _running(fixture, command, BENCH_TOKEN=fixture.token) as process:
        wait_until(lambda: _listens(fixture, UP_ADDRESS, MITMPROXY_PORT), "mitmdump listens")
        yield process


@contextmanager
def squid(fixture: Fixture) -> Iterator[int]:
    """Run Squid with ssl-bump, and a tunnel through it for clients that do not know CONNECT. Yield Squid's process id.

    The tunnel runs on the core of the clients.
    """
    directory, service = fixture.internet.directory / "squid", f"sallyport{os.getpid()}"
    directory.mkdir()
    shutil.chown(directory, "nobody")
    unpacked = Path(os.environ["SALLYPORT_SQUID"])
    hosts, configuration = directory / "hosts", directory / "squid.conf"
    hosts.write_text(f"{PAGES[INJECTED]} {INJECTED}\n")
    configuration.write_text(_squid(fixture, directory, unpacked))
    program = pinned(PROXY_CORE, str(unpacked / "usr/sbin/squid"), "-N", "-n", service, "-f", str(configuration))
    tunnel = (
        sys.executable,
        "-m",
        "bench.tunnel",
        f"{UP_ADDRESS}:{SQUID_PORT}",
        f"{UP_ADDRESS}:{_BUMP_PORT}",
        INJECTED,
    )
    libraries = ":".join(map(str, (unpacked / "usr/lib").glob("*-linux-gnu")))
    place = (fixture.internet, fixture.internet.up)
    try:
        with (
            _running(
                fixture, in_namespace(*place, *pinned(PROXY_CORE, *program)), LD_LIBRARY_PATH=libraries
            ) as process,
            _running(fixture, in_namespace(*place, *pinned(OTHER_CORE, *tunnel))),
        ):
            for port, what in ((_BUMP_PORT, "Squid listens"), (SQUID_PORT, "the tunnel listens")):
                wait_until(lambda port=port: _listens(fixture, UP_ADDRESS, port), what)  # type: ignore[misc]
            yield process
    finally:
        for segment in Path("/dev/shm").glob(f"{service}-*"):  # noqa: S108 - Squid leaves them behind
            segment.unlink()


def _squid(fixture: Fixture, directory: Path, unpacked: Path) -> str:
    """Return Squid's configuration: a policy, a header and an access log, as the gateway has them."""
    certificate = fixture.internet.directory / f"{INJECTED}.pem"
    return f"""
http_port {UP_ADDRESS}:{_BUMP_PORT} ssl-bump tls-cert={certificate} generate-host-certificates=off
ssl_bump bump all
acl judged method CONNECT GET PUT
http_access allow judged
http_access deny all
request_header_access Authorization deny all
request_header_add Authorization "Bearer {fixture.token}" all
tls_outgoing_options cafile={fixture.internet.roots}
hosts_file {directory}/hosts
access_log stdio:{directory}/access.log
cache_log {directory}/cache.log
cache deny all
workers 1
cache_effective_user nobody
coredump_dir {directory}
pid_filename none
netdb_filename none
pinger_enable off
unlinkd_program {unpacked}/usr/lib/squid/unlinkd
mime_table {unpacked}/usr/share/squid/mime.conf
icon_directory {unpacked}/usr/share/squid/icons
error_directory {unpacked}/usr/share/squid-langpack/templates
shutdown_lifetime 0 seconds
"""


@contextmanager
def _running(fixture: Fixture, command: list[str], **environment: str) -> Iterator[int]:
    """Run a program; yield its process id. `nsenter`, `setpriv` and `taskset` become the program that they start."""
    with (
        (fixture.internet.directory / "peers.log").open("ab") as log,
        subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log) as process,
    ):
        try:
            yield process.pid
        finally:
            process.terminate()


def _listens(fixture: Fixture, address: str, port: int) -> bool:
    with fixture.internet.open_socket(fixture.internet.control, socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0

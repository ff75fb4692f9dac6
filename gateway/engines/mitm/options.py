"""The options of mitmproxy.

- There is no `Master`, no `AddonManager` and no default add-on. `mitmproxy.ctx` is never set or read. mitmproxy's
  dispatcher logs the exception of an add-on and continues the flow; `connection` aborts it instead.
- Options are built in code. No file, environment variable or flag changes them. `SSLKEYLOGFILE` would make mitmproxy's
  own TLS contexts write keys to disk; `contexts` makes the contexts that are used.
"""

from typing import Final

from mitmproxy import options as mitm_options

_ADDED: Final[tuple[tuple[str, type, object], ...]] = (
    # Options of mitmproxy's add-ons that its layers read, too.
    ("store_streamed_bodies", bool, False),
    ("connection_strategy", str, "lazy"),
    ("keep_host_header", bool, False),
    ("proxy_debug", bool, False),
    ("normalize_outbound_headers", bool, True),
    ("validate_inbound_headers", bool, True),
)


def options(idle_seconds: int) -> mitm_options.Options:
    """Return the options for the layers of one flow, which ends after `idle_seconds` without traffic."""
    result = mitm_options.Options()
    for name, kind, value in _ADDED:
        result.add_option(name, kind, value, "")
    result.add_option("stream_large_bodies", str | None, None, "")
    result.add_option("body_size_limit", str | None, None, "")
    result.update(  # type: ignore[no-untyped-call]
        rawtcp=False,
        http3=False,
        upstream_cert=False,
        http2_ping_keepalive=0,
        tcp_timeout=idle_seconds,
    )
    return result

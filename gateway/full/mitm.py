"""The one place that says how mitmproxy is set up here.

- There is no `Master`, no `AddonManager` and no default add-on; `mitmproxy.ctx` is never set and nothing here reads it.
  (mitmproxy's dispatcher logs an add-on's exception and lets the flow go on; ours in `connection` ends the flow.)
- Options are built in code. No file, no environment variable and no flag reaches them: `SSLKEYLOGFILE` would make
  mitmproxy's own contexts write keys to disk, and ours (see `contexts`) are not made by mitmproxy.
"""

from typing import Final

from mitmproxy import options as mitm_options

_ADDED: Final[tuple[tuple[str, type, object], ...]] = (
    # These belong to mitmproxy's add-ons, but its layers read them.
    ("store_streamed_bodies", bool, False),
    ("connection_strategy", str, "lazy"),
    ("keep_host_header", bool, False),
    ("proxy_debug", bool, False),
    ("normalize_outbound_headers", bool, True),
    ("validate_inbound_headers", bool, True),
)


def options(idle_seconds: int) -> mitm_options.Options:
    """Options for one flow's layers; `idle_seconds` without traffic end it."""
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

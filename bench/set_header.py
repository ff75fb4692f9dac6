"""The peer's addon: sets the header that the gateway injects. Loaded by `mitmdump -s`."""

import os

from mitmproxy import http


def requestheaders(flow: http.HTTPFlow) -> None:
    """Set the header."""
    flow.request.headers["authorization"] = f"Bearer {os.environ['BENCH_TOKEN']}"

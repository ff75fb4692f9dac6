"""One trust store for all HTTP clients of a test session.

httpx reads the file of all public certificate authorities for each client, also for a client of plain HTTP. That takes
40 ms of a processor, and the published SDK makes several clients for each sandbox. The tests call no public host.
"""

import os
import ssl
from functools import cache
from typing import Any

import httpx
from httpx._transports import default

_create = httpx.create_ssl_context


@cache
def _public(trust_env: bool, _file: str | None, _directory: str | None) -> ssl.SSLContext:
    """Return the context for the values of the two variables that httpx reads if `trust_env` is true."""
    return _create(trust_env=trust_env)


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is True and cert is None:
        return _public(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    return _create(verify=verify, cert=cert, trust_env=trust_env)


def share() -> None:
    """Let each later client that has no trust store of its own use the same one."""
    httpx.create_ssl_context = default.create_ssl_context = _context

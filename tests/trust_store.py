"""One trust store for all HTTP clients of a test session.

httpx reads the file of all public certificate authorities for each client, also for a client of plain HTTP. That takes
40 ms of a processor, and the published SDK makes several clients for each sandbox. The tests call no public host.
"""

import os
import ssl
from functools import cache
from typing import Any

from httpx._transports import default

_create = default.create_ssl_context


@cache
def _public(_file: str | None, _directory: str | None) -> ssl.SSLContext:
    """Return the context for the values of the two variables that httpx reads."""
    return _create()


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is True and cert is None and trust_env:
        return _public(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    return _create(verify=verify, cert=cert, trust_env=trust_env)


def share() -> None:
    """Let each later client of httpx that has no trust store of its own use the same one."""
    default.create_ssl_context = _context

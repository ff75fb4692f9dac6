"""Framing by mitmproxy as a library, for HTTP/1.1 and HTTP/2. Only this package imports mitmproxy."""

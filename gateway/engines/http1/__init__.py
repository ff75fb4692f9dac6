"""The engine for HTTP/1.1, over intercepted TLS and in plain text."""

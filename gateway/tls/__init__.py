"""TLS at the gateway: reads a ClientHello, and makes the certificates that the worker presents."""

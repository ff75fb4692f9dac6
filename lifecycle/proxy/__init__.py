"""The server proxy: HTTP and WebSocket to a port of a sandbox."""

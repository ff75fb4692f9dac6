"""How Sallyport's processes speak to one another: JSON frames over unix sockets.

This package knows nothing of policies, secrets or sandboxes. It is the one place that reads and writes bytes
between our own processes, so its limits hold everywhere.

- A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON: one object, at most `MAX_FRAME` bytes.
- File descriptors travel beside a request's first byte (SCM_RIGHTS), at most `MAX_FDS` of them, and only to an end
  that was made to take them.
- A peer that breaks the framing is disconnected; nothing is ever resynchronised.
"""

from wire.errors import Code, RemoteError, RequestError
from wire.frames import MAX_FDS, FrameError, Message, receive, send
from wire.limits import MAX_FRAME, NARROW, WHOLE, Limits
from wire.operations import Done, Notification, Operations, Ping, Request
from wire.rpc import Client, Handler, serve_connection, serve_unix
from wire.sockets import Peer, WrongServer, bind_unix, connect_unix, inherited_listener

__all__ = [
    "MAX_FDS",
    "MAX_FRAME",
    "NARROW",
    "WHOLE",
    "Client",
    "Code",
    "Done",
    "FrameError",
    "Handler",
    "Limits",
    "Message",
    "Notification",
    "Operations",
    "Peer",
    "Ping",
    "RemoteError",
    "Request",
    "RequestError",
    "WrongServer",
    "bind_unix",
    "connect_unix",
    "inherited_listener",
    "receive",
    "send",
    "serve_connection",
    "serve_unix",
]

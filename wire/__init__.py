"""Communication between Sallyport's processes: JSON frames over unix sockets.

The package is independent of policies, secrets and sandboxes. Only this package reads and writes bytes between
Sallyport's processes, so its limits apply to all of them.

- A frame is a 4-byte big-endian length and as many bytes of UTF-8 JSON: one object, at most `MAX_FRAME` bytes.
- File descriptors accompany the first byte of a request (SCM_RIGHTS), at most `MAX_FDS` of them. Only an end that is
  configured for them accepts them.
- A peer that violates the framing is disconnected. There is no resynchronisation.
"""

from wire.errors import Code, RemoteError, RequestError
from wire.frames import MAX_FDS, FrameError, Message, receive, send
from wire.limits import MAX_FRAME, NARROW, WHOLE, FrameLimits
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
    "FrameLimits",
    "Handler",
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

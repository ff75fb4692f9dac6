"""`python -m lifecycle.serve serve.json`: the HTTP server, as an unprivileged user.

hostd starts it under its own user and passes the listening socket (`runtimes/process/api_listener.py`). The socket
outlives the process, so connections wait in it during a restart of the process. The process exits with 78 if its
configuration or state database is unusable, because a restart would not help.
"""

import base64
import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn
import uvloop

import wire
from lifecycle.api.app import build
from lifecycle.api.connections import UVICORN_LOG_LEVEL, ApiConnection, expect_silence
from lifecycle.api.credentials import RouteKeys, Tokens
from lifecycle.api.edge import Edge
from lifecycle.config.serve import ServeConfig
from lifecycle.egress.policies import Policies
from lifecycle.lasting import route_key, token_key
from lifecycle.sandboxes.registry import RegistryError, SchemaError
from policy.load import PolicyError
from runtimes.process.watchdog import dump_nothing
from wire.errors import ConfigError

EXIT_CONFIG = 78
_OWN_ROUTE_KEY = "0"
READY_FD = "SALLYPORT_READY_FD"

_log = logging.getLogger("lifecycle")


async def serve(config: ServeConfig, listener: socket.socket) -> None:
    """Serve on `listener` until SIGTERM or SIGINT."""
    prepare(listener)
    policies = Policies.read(config.policy_file)
    server = build(config, policies, Tokens(token_key(config.state_dir)), route_keys(config))
    async with server.running():
        say_ready()
        await uvicorn.Server(http_settings(server.edge, config)).serve(sockets=[listener])


def route_keys(config: ServeConfig) -> RouteKeys:
    """Return the keys of signed routes: the configured ones, or one that the server makes."""
    if config.route_keys is None:
        return RouteKeys(_OWN_ROUTE_KEY, {_OWN_ROUTE_KEY: route_key(config.state_dir)})
    keys = {name: base64.b64decode(key) for name, key in config.route_keys.keys.items()}
    return RouteKeys(config.route_keys.active, keys)


def prepare(listener: socket.socket) -> None:
    """Set the options that accepted connections inherit."""
    # asyncio sets this only on sockets with an explicit protocol, which accepted sockets do not have.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    expect_silence(listener)


def say_ready() -> None:
    """Report to the parent that the API listens: write one byte to the descriptor that it passed, if any."""
    number = os.environ.pop(READY_FD, "")
    if number.isdigit():
        with os.fdopen(int(number), "wb", buffering=0) as pipe:
            pipe.write(b"1")


def http_settings(edge: Edge, config: ServeConfig) -> uvicorn.Config:
    """Return uvicorn's configuration. A request's claims about its connection are not accepted."""
    return uvicorn.Config(
        edge,
        http=ApiConnection,
        log_level=UVICORN_LOG_LEVEL,
        ws="websockets-sansio",
        ws_max_size=64 * 1024 * 1024,
        ws_ping_interval=None,
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=config.keep_alive,
        limit_concurrency=config.concurrency,
        backlog=config.backlog,
        timeout_graceful_shutdown=config.graceful_shutdown,
    )


def main(arguments: list[str]) -> int:
    """Run the server; return its exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="serve %(levelname)s %(name)s: %(message)s")
    if len(arguments) != 1:
        _log.error("usage: python -m lifecycle.serve CONFIG.json")
        return EXIT_CONFIG
    dump_nothing()  # values of credential vaults pass through it
    try:
        config = ServeConfig.read(Path(arguments[0]))
        logging.getLogger().setLevel(config.log_level)
        os.umask(0o077)
        uvloop.run(serve(config, wire.inherited_listener()))
    except (ConfigError, PolicyError, SchemaError, ValueError) as error:
        _log.error("%s", error)
        return EXIT_CONFIG
    except (OSError, RegistryError) as error:
        _log.error("cannot run: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

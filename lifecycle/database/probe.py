"""The question whether `serve` will reach its PostgreSQL, asked before it starts.

A separate process asks as the user of `serve`, because access to a socket, a key or a password file depends on the
user.
"""

import os
import select
import signal
import time

from lifecycle.config.serve import DatabaseConfig
from lifecycle.database.engine import PostgreSQL
from lifecycle.sandboxes.registry import RegistryError

_MOST = 4096


def problem(config: DatabaseConfig, uid: int) -> str:
    """Return what keeps the user `uid` from the database, without a password; empty if nothing does.

    Only root can ask for another user. The answer comes within the limits of `config`.
    """
    database = PostgreSQL(
        config.dsn, connections=1, connect_seconds=config.connect_seconds, statement_seconds=config.statement_seconds
    )
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, _asked(database, uid).encode()[:_MOST])
        finally:
            os._exit(0)
    os.close(writing)
    try:
        return _answer(reading, time.monotonic() + (database.patience or 0.0), database.place)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # It has ended or hangs. Its number is not free before the wait.
        os.waitpid(child, 0)


def _asked(database: PostgreSQL, uid: int) -> str:
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        with database.statement() as connection:
            connection.exec_driver_sql("SELECT 1")
    except RegistryError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the parent has to get an answer
        return f"the state database {database.place} cannot be asked: {type(error).__name__}"
    return ""


def _answer(reading: int, deadline: float, place: str) -> str:
    found = b""
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (part := os.read(reading, _MOST)):
            return found.decode(errors="replace")
        found += part
    return f"the state database {place} does not answer"

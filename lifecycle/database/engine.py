"""The engines of the two databases, and what a call of either may cost.

- A statement is its own transaction; `transaction` is for a read-modify-write. An answered write is on the disk: WAL
  with `synchronous=FULL` in SQLite, `synchronous_commit` in PostgreSQL.
- Each fault of a database is a `RegistryError`. Its text contains no parameter of a statement and no password.
- PostgreSQL: the number of connections is bounded, and so is each step: the connect, a statement by the server, the
  wait for a server that answers nothing by `interrupt`. After a failed connect the next one is a second later, so that
  calls do not queue behind a host that does not answer.
- A connection whose server has ended in the meantime is found before its use and replaced.
"""

import contextlib
import logging
import os
import select
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import QueuePool, StaticPool

from lifecycle.sandboxes.registry import RegistryError

if TYPE_CHECKING:
    import psycopg

_RETRY_SECONDS = 1.0
_REACTION_SECONDS = 2.0
"""The time between the server's limit for a statement and ours for its answer."""
_MOST_TEXT = 300

_log = logging.getLogger(__name__)


class SQLite:
    """A database file, opened once.

    Attributes:
        place: the database, for messages.
        connections: the number of calls that can run at once.
        patience: the seconds after which `interrupt` ends a call; None: no call waits for longer than five.
    """

    dialect = "sqlite"
    connections = 1
    patience: float | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = str(path)
        self._faults = _Faults(self.place)
        self._opened: sqlite3.Connection | None = None
        self._engine = create_engine("sqlite://", creator=self._connect, poolclass=StaticPool, hide_parameters=True)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=5, check_same_thread=False, isolation_level=None)
        try:
            self.path.chmod(0o600)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
        except BaseException:
            connection.close()
            raise
        self._opened = connection
        return connection

    def version(self) -> int:
        """Return a number that changes when another program has committed a change.

        Raises:
            RegistryError: the file is not open, or cannot be read.
        """
        try:
            if self._opened is not None:
                return int(self._opened.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.Error as error:
            raise RegistryError(f"the state database {self.place} failed: {error}") from None
        raise RegistryError(f"the state database {self.place} is not open")

    @contextlib.contextmanager
    def statement(self) -> Iterator[Connection]:
        """Lend a connection on which each statement is a transaction.

        Raises:
            RegistryError: a statement failed.
        """
        with self._faults(), self._engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Lend a connection for one transaction. Other writers wait from its begin on. If the block raises, nothing is
        changed.
        """
        with self._faults(), self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
            connection.commit()

    def copy(self, target: Path) -> None:
        """Write a copy of the database to `target`, complete or not at all.

        Raises:
            RegistryError, OSError: it could not be written.
        """
        temporary = target.with_name(f"{target.name}.new")
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
        with self.statement() as connection:
            source = connection.connection.driver_connection
            assert isinstance(source, sqlite3.Connection)  # noqa: S101 - narrows what SQLAlchemy keeps as Any
            try:
                with contextlib.closing(sqlite3.connect(temporary)) as copy:
                    source.backup(copy)
            except sqlite3.Error as error:
                raise RegistryError(f"{temporary}: {error}") from None
        fd = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(target)

    def interrupt(self) -> None:
        """Do nothing: no call needs it."""

    def close(self) -> None:
        """Close the file."""
        self._opened = None
        self._engine.dispose()


@dataclass
class _Call:
    """A call in progress: its begin, by the monotonic clock, and its connection as soon as there is one."""

    began: float
    connection: Any = None


class PostgreSQL:
    """A server's database, behind a bounded pool of connections.

    Args:
        dsn: in one of libpq's forms. All options of libpq are passed to it, TLS included.
        connections: the most at once.
        connect_seconds: the limit for one address of the server to accept a connection.
        statement_seconds: the limit for a statement, and for a wait for a lock.
    """

    dialect = "postgresql"

    def __init__(self, dsn: str, *, connections: int, connect_seconds: int, statement_seconds: int) -> None:
        import psycopg

        from lifecycle.database.dsn import described, parsed

        self._psycopg = psycopg
        self.connections = connections
        self.patience: float | None = connect_seconds + statement_seconds + _REACTION_SECONDS
        given = parsed(dsn)
        self.place = described(given)
        hidden = tuple(str(given[name]) for name in ("password", "sslpassword") if given.get(name))
        self._faults = _Faults(self.place, hidden)
        self._parameters: dict[str, Any] = {
            "fallback_application_name": "sallyport",
            "target_session_attrs": "read-write",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 1000 * statement_seconds,
            **given,
            "client_encoding": "UTF8",
            "connect_timeout": connect_seconds,
        }
        self._statement_seconds = statement_seconds
        self._engine = self._made(connect_seconds)
        self._single = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        """The calls in progress, by thread."""
        self._failed: tuple[float, str] | None = None
        """The time and the text of the last connect, if it failed."""

    def _made(self, connect_seconds: int) -> Engine:
        engine = create_engine(
            "postgresql+psycopg://",
            creator=self._connect,
            poolclass=QueuePool,
            pool_size=self.connections,
            max_overflow=0,
            pool_timeout=connect_seconds,
            hide_parameters=True,
        )
        event.listen(engine, "checkout", self._check)
        return engine

    def _connect(self) -> "psycopg.Connection[Any]":
        if self._failed is not None and time.monotonic() - self._failed[0] < _RETRY_SECONDS:
            raise self._psycopg.OperationalError(self._failed[1])
        try:
            connection = self._psycopg.connect(**self._parameters)
        except self._psycopg.Error as error:
            self._failed = (time.monotonic(), str(error))
            raise
        self._failed = None
        self._uses(connection)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: "psycopg.Connection[Any]") -> None:
        """Set the limits of the session, and check that what it writes is what was sent and stays."""
        limit = f"{self._statement_seconds}s"
        settings = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        limits = ", ".join("set_config(%s, %s, false)" for _ in settings)
        query = f"SELECT current_setting('server_encoding'), current_setting('synchronous_commit'), {limits}"
        row = connection.execute(query, [word for name in settings for word in (name, limit)]).fetchone()
        encoding, synchronous = (row or ("", ""))[:2]
        if encoding != "UTF8":
            raise self._psycopg.NotSupportedError(f"its encoding is {encoding}; create it with ENCODING 'UTF8'")
        if synchronous == "off":
            connection.execute("SET synchronous_commit = on")
        connection.commit()

    @staticmethod
    def _check(connection: Any, *_: object) -> None:
        """Refuse a pooled connection on which something waits: nothing was asked, so it is the server's end."""
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        if poll.poll(0):
            raise DisconnectionError

    @contextlib.contextmanager
    def statement(self) -> Iterator[Connection]:
        """Lend a connection on which each statement is a transaction.

        Raises:
            RegistryError: the connect or a statement failed. It is unknown whether the statement was executed.
        """
        with self._faults(), self._timed(), self._single.connect() as connection:
            self._uses(connection.connection.driver_connection)
            yield connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Lend a connection for one transaction. If the block raises, nothing is changed."""
        with self._faults(), self._timed(), self._engine.connect() as connection:
            self._uses(connection.connection.driver_connection)
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Note that this thread makes a call now, from the connect to the commit."""
        thread = threading.get_ident()
        with self._lock:
            self._calls[thread] = _Call(time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                del self._calls[thread]

    def _uses(self, connection: Any) -> None:
        """Note the connection of this thread's call."""
        with self._lock:
            if (call := self._calls.get(threading.get_ident())) is not None:
                call.connection = connection

    def interrupt(self) -> None:
        """Shut down the sockets of calls that exceed `patience`, so that the threads that wait get an error."""
        began = time.monotonic() - (self.patience or 0.0)
        with self._lock:
            for call in self._calls.values():
                if call.began <= began and call.connection is not None:
                    with (
                        contextlib.suppress(OSError, self._psycopg.Error),
                        socket.socket(fileno=os.dup(call.connection.fileno())) as end,
                    ):
                        end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


type Database = SQLite | PostgreSQL


class _Faults:
    """The translation of a database's faults. The log gets the first fault, and the first success after it."""

    def __init__(self, place: str, hidden: tuple[str, ...] = ()) -> None:
        self._place = place
        self._hidden = hidden
        self._answers = True

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            text = f"the state database {self._place} failed: {_text(error, self._hidden)}"
            if self._answers:
                self._answers = False
                _log.error("%s", text)
            raise RegistryError(text) from None
        if not self._answers:
            self._answers = True
            _log.info("the state database %s answers again", self._place)


def _text(error: SQLAlchemyError, hidden: tuple[str, ...]) -> str:
    """Return the cause in one line: the driver's words without detail of rows, else the name of the error."""
    if not isinstance(error, DBAPIError) or error.orig is None:
        return type(error).__name__
    primary = getattr(getattr(error.orig, "diag", None), "message_primary", None)
    text = " ".join(str(primary or error.orig).split())
    for secret in hidden:
        text = text.replace(secret, "***")
    return text[:_MOST_TEXT] or type(error.orig).__name__

"""Opens the database behind a store, a file or a server, and says its failures in one line."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, Pool, QueuePool, StaticPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from dmuon_tune.errors import CacheError, UsageError, said

from .migrations import SCHEMA_VERSION, CorruptCacheError, found_version, prepare, require
from .paths import CACHE_DIR_VARIABLE, URL_PATTERN

BUSY_TIMEOUT_VARIABLE = "DMUON_TUNE_BUSY_TIMEOUT_S"
DEFAULT_BUSY_TIMEOUT_S = 10.0
RETRY_EVERY_S = 0.02
URL_ADVICE = "write postgresql+psycopg://user:password@host/name, special characters of the password as %XX"
DRIVER = "postgresql+psycopg"
TAR_MAGIC = (257, b"ustar")  # POSIX.1-1988: at this offset of the first header
CONNECTION = {"keepalives_idle": 10, "tcp_user_timeout": 30000}  # libpq: s, ms until a silent server counts as gone
SESSION = {  # s, s, count, ms until the server ends what a dead machine or a suspended process has begun
    "tcp_keepalives_idle": 3, "tcp_keepalives_interval": 1, "tcp_keepalives_count": 3,
    "idle_in_transaction_session_timeout": 60000,
}
LEAST_CONNECT_S = 2  # libpq takes no less
SIDE_FILES = ("-wal", "-shm", "-journal")
UNDECODABLE = "Could not decode to UTF-8"  # sqlite3, of a column; it has no code of SQLite's


def busy_timeout_s() -> float:
    """How long to wait for another process's lock, seconds."""
    text = os.environ.get(BUSY_TIMEOUT_VARIABLE) or str(DEFAULT_BUSY_TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UsageError(f"{BUSY_TIMEOUT_VARIABLE} must be seconds, not {text!r}")
    return seconds


def locate(path_or_url: str | Path) -> Path | URL | None:
    """A file's path, a database server's URL, or None for a database in memory (``sqlite://``)."""
    if isinstance(path_or_url, Path) or not URL_PATTERN.match(path_or_url):
        if not str(path_or_url):
            raise UsageError("the cache's path is empty; name a file")
        if isinstance(path_or_url, str) and "://" in path_or_url:
            raise UsageError(f"the cache's URL is malformed; {URL_ADVICE}")
        return Path(path_or_url).absolute()
    try:
        url = make_url(path_or_url)
    except (ArgumentError, ValueError):
        raise UsageError(f"the cache's URL is malformed; {URL_ADVICE}") from None  # its parts may be a password's
    if "@" in (url.host or "") + (url.database or ""):
        raise UsageError(f"the cache's URL has an unquoted '@' in its password; {URL_ADVICE}")
    if url.get_backend_name() == "postgresql":
        return url.set(drivername=DRIVER) if url.drivername == "postgresql" else url
    if url.get_backend_name() != "sqlite":
        raise UsageError(f"cache {describe(url)} is of no known database; use a file path or postgresql://…")
    return Path(url.database).absolute() if url.database not in (None, "", ":memory:") else None


def describe(location: Path | URL | None) -> str:
    """A location for messages; a URL without its password and its options, which may hold one too."""
    if isinstance(location, URL):
        return location.set(query={}).render_as_string(hide_password=True)
    return str(location or "in memory")


def open_engine(location: Path | URL | None, read_only: bool, shipped: bool = False) -> Engine:
    """An engine for a location of :func:`locate`; a file's folder is made when it is opened for writing.

    ``shipped`` says that nobody writes a read-only file, whatever its permissions are.
    """
    timeout_s = busy_timeout_s()
    if isinstance(location, URL):
        return _open_server(location, read_only, timeout_s)
    pool: type[Pool] = StaticPool  # a database in memory lives as long as its one connection
    if location is None:
        database = "file::memory:"
    else:
        database, pool = _file_uri(location, read_only, shipped), QueuePool
        if not read_only:
            make_folder(location.parent)

    def connect() -> sqlite3.Connection:
        # isolation_level=None: transactions begin where SQLAlchemy says so, not at sqlite3's discretion
        raw = sqlite3.connect(database, timeout=timeout_s, isolation_level=None, check_same_thread=False, uri=True)
        raw.execute("PRAGMA foreign_keys=ON")
        if not read_only:
            raw.execute("PRAGMA synchronous=NORMAL")
        return raw

    engine = create_engine("sqlite://", creator=connect, poolclass=pool)
    event.listen(engine, "begin", _begin)
    return engine


def _open_server(url: URL, read_only: bool, timeout_s: float) -> Engine:
    wanted = {**CONNECTION, "connect_timeout": max(LEAST_CONNECT_S, round(timeout_s))}
    options = {name: value for name, value in wanted.items() if name not in url.query}
    try:
        engine = create_engine(url, pool_pre_ping=True, connect_args=options)
    except (ImportError, NoSuchModuleError) as error:
        raise CacheError(
            f"no driver for {describe(url)}: {error}; install dmuon-tune[postgres] and write {DRIVER}://…"
        ) from error

    settings = {**SESSION, "lock_timeout": max(1, round(1000 * timeout_s))}

    def limit(raw: Any, record: object) -> None:
        autocommit, raw.autocommit = raw.autocommit, True
        with raw.cursor() as cursor:
            cursor.execute("; ".join(f"SET {name} = {value}" for name, value in settings.items()))
        raw.autocommit = autocommit

    event.listen(engine, "connect", limit)
    return engine.execution_options(postgresql_readonly=True) if read_only else engine


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("alone", False):
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("writes", False) else "BEGIN")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise CacheError(
            f"cannot make the cache's folder {folder}: {error.strerror}; "
            f"set {CACHE_DIR_VARIABLE} to a writable folder, or let --cache name a file in one"
        ) from error


def _file_uri(path: Path, read_only: bool, shipped: bool) -> str:
    uri = "file:" + quote(os.fsencode(path))  # '%', '?' and '#' in a name would end it
    if not read_only:
        return uri + "?mode=rwc"
    if not os.path.exists(path):
        raise CacheError(f"no cache at {path}; fill it with: dmuon-tune tune")
    return uri + ("?mode=ro&immutable=1" if _is_immutable(path, shipped) else "?mode=ro")


def _is_immutable(path: Path, shipped: bool) -> bool:
    """Nobody writes the file: SQLite then needs no lock and no side files, which it could perhaps not make either."""
    folder_is_writable = os.access(path.parent, os.W_OK)
    wal = Path(f"{path}-wal")
    if os.path.exists(wal) and wal.stat().st_size and (folder_is_writable or os.access(f"{path}-shm", os.R_OK)):
        return False  # results that lie in the log alone
    return shipped or not (folder_is_writable and os.access(path, os.W_OK))


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes that do too; without effect where the file system locks no folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise CacheError(
            f"cannot read the cache's folder {folder}: {error.strerror}; set {CACHE_DIR_VARIABLE} to another folder"
        ) from error
    try:
        # The kernel wakes who waits, where who asks again and again may starve among sixteen; a thread bounds the wait.
        # One that is still waiting when the descriptor is closed gives the lock back as soon as it has it.
        waiting = threading.Thread(target=_lock, args=(descriptor,), daemon=True)
        waiting.start()
        waiting.join(busy_timeout_s())
        if waiting.is_alive():
            raise _locked(str(folder))
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # some network file systems lock no folders
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def set_aside(path: Path) -> Path:
    """Rename a corrupt file, with its side files, to a name that no file has."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = Path(f"{path}.corrupt-{stamp}")
    path.rename(aside)
    for suffix in SIDE_FILES:
        side = Path(f"{path}{suffix}")
        if side.exists():
            side.rename(f"{aside}{suffix}")
    return aside


def use_wal(engine: Engine, where: str) -> None:
    """Switch a file to write-ahead logging: readers never wait. SQLite's own waiting does not cover this switch."""
    deadline = time.monotonic() + busy_timeout_s()
    while True:
        try:
            with translated_errors(where):
                return run_alone(engine, "PRAGMA journal_mode=WAL")
        except LockedCacheError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_EVERY_S)


def readable(engine: Engine, where: str) -> Engine:
    """``engine`` where it can be read as it is; for a file of an older schema one of a copy in memory, brought up to
    date. CacheError for everything else."""
    with engine.connect() as connection:
        found = found_version(connection, where)
        if found is None or found >= SCHEMA_VERSION or connection.dialect.name != "sqlite":
            require(found, connection, where)
            return engine
    copy = open_engine(None, read_only=False)
    original, target = engine.raw_connection(), copy.raw_connection()
    try:
        original.driver_connection.backup(target.driver_connection)  # type: ignore[union-attr]
    finally:
        target.close()
        original.close()
        engine.dispose()
    with copy.execution_options(writes=True).begin() as connection:
        prepare(connection, where)
    return copy


def is_bundle(path: str | Path) -> bool:
    """Whether this is a tar file, as a bundle is."""
    place, magic = TAR_MAGIC
    if not os.path.isfile(path):  # opening a named pipe would wait for a writer
        return False
    try:
        with open(path, "rb") as file:
            return file.read(place + len(magic))[place:] == magic
    except OSError:
        return False


def rest(engine: Engine) -> None:
    """Fold the log back into the file when nobody else has it open, so that a reader needs no side files."""
    try:
        run_alone(engine, "PRAGMA busy_timeout=0")
        run_alone(engine, "PRAGMA journal_mode=DELETE")
    except (DBAPIError, sqlite3.Error):
        return  # others use it: the last one out does it


def run_alone(engine: Engine, statement: str) -> None:
    """Run what no transaction may contain."""
    raw = engine.raw_connection()
    try:
        raw.cursor().execute(statement).close()
    finally:
        raw.close()


class LockedCacheError(CacheError):
    """Another process held the cache's lock for longer than the busy timeout."""


@contextmanager
def translated_errors(where: str) -> Iterator[None]:
    """Turn the database's errors into CacheError: what, where, what to do."""
    try:
        yield
    except DBAPIError as error:
        raise _translate(error.orig, where) from error
    except sqlite3.Error as error:
        raise _translate(error, where) from error
    except UnicodeDecodeError as error:  # of a text in the file, or of what SQLite says about one
        raise _damaged(where, said(error)) from error


def _translate(error: Any, where: str) -> CacheError:
    reason = " ".join(str(error).split())
    if isinstance(error, sqlite3.Error):
        return _translate_sqlite(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF, reason, where)
    return _translate_postgresql(getattr(error, "sqlstate", None), reason, where)


def _locked(where: str) -> LockedCacheError:
    return LockedCacheError(
        f"cache {where} is locked by another process for more than {busy_timeout_s():g} s; "
        f"wait for it or raise {BUSY_TIMEOUT_VARIABLE}"
    )


def _damaged(where: str, reason: str) -> CorruptCacheError:
    return CorruptCacheError(f"cache {where} is truncated or damaged ({reason}); delete it and tune again")


def _translate_sqlite(code: int, reason: str, where: str) -> CacheError:
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return _locked(where)
    if code == sqlite3.SQLITE_NOTADB and is_bundle(where):
        return CorruptCacheError(
            f"{where} is a bundle, not a cache; take it with 'dmuon-tune cache import', or unpack it, a tar file"
        )
    if code == sqlite3.SQLITE_NOTADB:
        return CorruptCacheError(f"{where} is not an SQLite file, so not a cache; name another file or move it away")
    if code == sqlite3.SQLITE_CORRUPT or reason.startswith(UNDECODABLE):
        return _damaged(where, reason)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return CacheError(
            f"cache {where} is read-only or cannot be opened ({reason}); "
            f"set {CACHE_DIR_VARIABLE} to a writable folder, or let --cache name a file in one"
        )
    if code == sqlite3.SQLITE_FULL:
        return CacheError(f"no space left for cache {where}; free some and run again: what was measured is kept")
    return CacheError(f"cache {where}: {reason}; check the file")


def _translate_postgresql(state: str | None, reason: str, where: str) -> CacheError:
    """``state``: SQLSTATE, None where no connection was made or it broke."""
    if state == "55P03":  # lock_not_available
        return _locked(where)
    if state == "42501" or state == "25006":  # insufficient_privilege, read_only_sql_transaction
        return CacheError(f"cache {where} may not be written ({reason}); ask for the right to create and change tables")
    if state == "53100":  # disk_full
        return CacheError(f"no space left for cache {where}; free some and run again: what was measured is kept")
    if state is None or state[:2] in ("08", "57"):  # connection exceptions, operator intervention
        return CacheError(
            f"cache {where} cannot be reached ({reason}); check the URL and that the server runs, and run again"
        )
    return CacheError(f"cache {where}: {reason}; check the server")

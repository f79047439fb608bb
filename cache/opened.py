"""One cache's database, a file or a server: opened, checked, compacted, closed; sessions that tell what is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import URL, Connection, Engine, func, select
from sqlalchemy.orm import Session

from dmuon_tune.errors import CacheError, UsageError

from .chains import ChainRow
from .database import (
    LockedCacheError,
    describe,
    folder_lock,
    locate,
    make_folder,
    open_engine,
    readable,
    rest,
    run_alone,
    set_aside,
    translated_errors,
    use_wal,
)
from .dialect import upsert
from .migrations import CorruptCacheError, prepare
from .models import TrialRow
from .paths import CACHE_DIR_VARIABLE, user_cache_path
from .sound import MALFORMED

logger = getLogger("dmuon_tune.cache")


class OpenedCache:
    """An SQLite file, a database in memory (``sqlite://``) or a server's database. Every error is a CacheError."""

    def __init__(self, engine: Engine, location: Path | URL | None, read_only: bool) -> None:
        self._engine = engine
        self._location = location
        self.where = describe(location)
        self.read_only = read_only
        self._file: tuple[int, int] | None = None  # device and inode of what was opened for writing
        self._upsert = upsert(engine.dialect)

    @property
    def is_server(self) -> bool:
        return isinstance(self._location, URL)

    @property
    def is_private(self) -> bool:
        """Whether no other process can see it: a database in memory."""
        return self._location is None

    @classmethod
    def open(cls, path_or_url: str | Path, read_only: bool = False, shipped: bool = False) -> Self:
        """Open a cache; for writing it is created, or migrated to this schema, where need be.

        ``shipped`` says that nobody writes a file that is opened read-only. Raises CacheError for a file that is not
        a cache, is damaged, of a newer schema or locked, cannot be written, or (read-only) does not exist.
        """
        location = locate(path_or_url)
        if isinstance(location, Path) and os.path.isdir(location):
            raise CacheError(f"cache {location} is a folder; name a file in it")
        if isinstance(location, Path) and os.path.exists(location) and not os.path.isfile(location):
            raise CacheError(f"cache {location} is a pipe or device; name a file")
        with translated_errors(describe(location)):
            store = cls(open_engine(location, read_only, shipped), location, read_only)
        try:
            store._check_schema()
        except BaseException:
            store._engine.dispose()
            raise
        return store

    def _check_schema(self) -> None:
        with translated_errors(self.where), self._damage_told():
            if self.read_only:
                self._engine = readable(self._engine, self.where)
                return
            with self._engine.execution_options(writes=True).begin() as connection:
                prepare(connection, self.where)
        if isinstance(self._location, Path):
            use_wal(self._engine, self.where)
            self._file = _identity(self._location)

    def require_kept(self) -> None:
        """CacheError where what was written is not in the place that was opened: since then somebody removed the file,
        replaced it, or wrote over it."""
        if not isinstance(self._location, Path):
            return
        if _identity(self._location) != self._file:
            raise self._lost("another file is there" if os.path.exists(self._location) else "it is gone")
        results = self._results()
        self._engine.dispose()  # what a connection remembers may no longer be in the file
        try:
            self.check("quick_check")
            if self._results() >= results:
                return
        except CorruptCacheError as error:
            raise self._lost(str(error).split(";")[0]) from error
        raise self._lost("results are missing")

    def _results(self) -> int:
        with self._reading() as session:
            return sum(session.scalar(select(func.count()).select_from(row)) or 0 for row in (TrialRow, ChainRow))

    def _lost(self, how: str) -> CacheError:
        return CacheError(
            f"cache {self.where} was removed or changed from outside while it was in use ({how}); what was measured "
            f"meanwhile is lost: run again, into a file that nothing else writes"
        )

    @classmethod
    def open_user(cls, path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Self:
        """Open the cache to tune into: ``path``, or the user's cache.

        The user's cache (:func:`user_cache_path`) is set aside where it is corrupt, with one warning, and an empty one
        begun. Any other corrupt file, another program's database, a newer schema, a lock or an unwritable folder is a
        CacheError: nothing is lost or moved then. A database in memory is a UsageError.
        """
        location = locate(path if path is not None else user_cache_path(environ))
        if location is None:
            raise UsageError("a cache in memory ends with this process; name a file or a server's URL")
        if not isinstance(location, Path):
            return cls.open(location.render_as_string(False))
        make_folder(location.parent)
        with folder_lock(location.parent):  # else the second process to find it corrupt moves the first one's new file
            try:
                store = cls.open(location)
                store._check_pages()
                return store
            except CorruptCacheError as error:
                if location != user_cache_path(environ):
                    raise
                aside = set_aside(location)
                logger.warning("%s; set aside as %s, starting an empty cache", str(error).split(";")[0], aside.name)
            return cls.open(location)

    def _check_pages(self) -> None:
        try:
            self.check("quick_check")
        except CorruptCacheError:
            self.close()
            raise

    def check(self, how: str = "integrity_check") -> None:
        """CacheError where a file's pages, or (by ``quick_check`` not) its indices and rows, do not belong together."""
        if self.is_server:
            return
        with translated_errors(self.where), self._engine.connect() as connection:
            verdict = connection.exec_driver_sql(f"PRAGMA {how}(1)").scalar()
        if verdict != "ok":
            raise CorruptCacheError(f"cache {self.where} is damaged; delete it and tune again")

    def compact(self) -> None:
        """Give the space of deleted rows back, where others do not use the file."""
        if not self.is_server:
            with suppress(LockedCacheError), translated_errors(self.where):
                run_alone(self._engine, "VACUUM")

    def close(self) -> None:
        self._engine.dispose()
        if isinstance(self._location, Path) and not self.read_only:
            rest(self._engine)
            self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with translated_errors(self.where), Session(self._engine) as session, self._damage_told():
            yield session

    @contextmanager
    def _looking_up(self) -> Iterator[Connection]:
        """As :meth:`_reading`, for one statement: without a transaction around it."""
        with translated_errors(self.where), self._engine.connect() as connection, self._damage_told():
            yield connection.execution_options(alone=True)

    @contextmanager
    def _damage_told(self) -> Iterator[None]:
        """For what turns the schema and rows into values."""
        try:
            yield
        except (*MALFORMED, UsageError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise CorruptCacheError(
                f"cache {self.where} is damaged: it holds what none has written ({reason}); delete it and tune again"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        if self.read_only:
            raise CacheError(
                f"cache {self.where} is opened read-only; set {CACHE_DIR_VARIABLE} to a writable folder and tune there"
            )
        with translated_errors(self.where), Session(self._engine.execution_options(writes=True)) as session:
            with session.begin():
                yield session


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino

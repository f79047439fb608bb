"""Artefacts: compiled kernels in a folder beside the database, each built once, whole, and checked by its digest."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmuon_tune.errors import CacheError, DmuonTuneError
from dmuon_tune.portable import PortableCode

from .database import describe, locate, make_folder
from .key import TuningKey
from .paths import user_cache_path
from .sound import MALFORMED

FOLDER_NAME = "artefacts"
RECORD_SUFFIX, CODE_SUFFIX, LOCK_NAME = ".json", ".bin", ".lock"
VERSION = 1  # of a record's fields
NEW_PREFIX, LEFT_AFTER_S = ".new-", 3600.0
BUILD_COMMAND = "dmuon-tune cache build"


class ArtefactError(CacheError):
    """An artefact that cannot be read or is not what its record says."""


@dataclass(frozen=True)
class Artefact:
    """One configuration's compiled code: what it is of (``key``, ``config``), and how it is loaded.

    ``sha256`` is of the code's ``size_bytes`` bytes, which its file is named by; ``format`` and ``launch`` are those of
    :class:`PortableCode`.
    """

    key: TuningKey
    config: dict[str, Any]
    format: str
    sha256: str
    size_bytes: int
    launch: dict[str, Any]

    @property
    def id(self) -> str:
        """SHA-256 of the key and the configuration: the record's file name."""
        return artefact_id(self.key.sha256, self.config)

    @property
    def code(self) -> str:
        """SHA-256 of all that runs: the code and how it is launched, whatever it is said to be of."""
        text = json.dumps([self.format, self.sha256, self.launch], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def arch(self) -> str:
        return self.key.device.arch

    def label(self) -> str:
        return f"{self.key.kernel} for {self.key.problem.label()} on {self.arch}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION, "key_sha256": self.key.sha256, "key": self.key.to_dict(), "config": self.config,
            "format": self.format, "sha256": self.sha256, "size_bytes": self.size_bytes, "launch": self.launch,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Artefact:
        """ValueError where the fields are of another version or do not belong together."""
        if fields.get("version") != VERSION:
            raise ValueError(f"its version is {fields.get('version')!r}, this one reads {VERSION}")
        key = TuningKey.from_dict(fields["key"])
        if key.sha256 != fields["key_sha256"]:
            raise ValueError("its key is not the one it names")
        if len(fields["sha256"]) != 64 or not set(fields["sha256"]) <= set("0123456789abcdef"):
            raise ValueError("its digest is none")
        names = ("config", "format", "sha256", "size_bytes", "launch")
        return cls(key, **{name: fields[name] for name in names})


def artefact_id(key_sha256: str, config: Mapping[str, Any]) -> str:
    """SHA-256 of a tuning key's digest and a configuration's canonical text."""
    text = json.dumps(dict(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{key_sha256} {text}".encode()).hexdigest()


def artefacts_folder(cache: Path | str) -> Path:
    """Where a cache's artefacts lie: beside its file; those of a server or of a database in memory in the user's cache
    folder."""
    location = locate(cache)
    return (location if isinstance(location, Path) else user_cache_path()).parent / FOLDER_NAME


class ArtefactStore:
    """A folder of artefacts, for each a record ``<id>.json`` and the code ``<sha256>.bin``, which others may share.

    Files appear whole, or not at all: written under another name, synchronized, renamed, the code before its record.
    Reading changes nothing, so the folder may be read-only or absent. Every failure is an ArtefactError or CacheError.
    """

    def __init__(self, folder: Path | str, cache: str = "") -> None:
        """``cache`` names, for messages, the cache whose winners these are."""
        self.folder = Path(folder)
        self._cache = cache

    @classmethod
    def beside(cls, cache: Path | str) -> ArtefactStore:
        """The artefacts of a cache's file or URL."""
        return cls(artefacts_folder(cache), describe(locate(cache)))

    @property
    def advice(self) -> str:
        """What mends these artefacts, to stand after what is wrong; empty where they are of no cache."""
        return f"; build it again: {BUILD_COMMAND} --cache {shlex.quote(self._cache)}" if self._cache else ""

    def find(self, key_sha256: str, config: Mapping[str, Any] | None = None) -> Artefact | None:
        """The artefact of an entry's key and configuration (None: of any configuration), None where there is none."""
        if config is None:
            return next((found for found in self.all() if found.key.sha256 == key_sha256), None)
        return self._record(self.folder / f"{artefact_id(key_sha256, config)}{RECORD_SUFFIX}")

    def all(self) -> list[Artefact]:
        """Every artefact, in the order of their ids; damaged records are left out: :meth:`verify` names them."""
        found = []
        for path in self._records():
            try:
                found.append(self._record(path))
            except ArtefactError:
                continue
        return [artefact for artefact in found if artefact is not None]

    def verify(self, leave_out: Collection[str] = ()) -> list[str]:
        """What is wrong with records and code, one line each; empty where everything is as its digest says.
        ``leave_out``: artefacts that are not looked at, by id."""
        wrong = []
        for path in self._records():
            if path.name.removesuffix(RECORD_SUFFIX) in leave_out:
                continue
            try:
                artefact = self._record(path)
                if artefact is not None:
                    self.read(artefact)
            except ArtefactError as error:
                wrong.append(str(error))
        return wrong

    def files(self, artefact: Artefact) -> tuple[Path, Path]:
        """The code's file and the record's."""
        record = self.folder / f"{artefact.id}{RECORD_SUFFIX}"
        return self.folder / f"{artefact.sha256}{CODE_SUFFIX}", record

    def read(self, artefact: Artefact) -> bytes:
        """The code, checked by its digest."""
        path = self.files(artefact)[0]
        try:
            data = path.read_bytes()
        except OSError as error:
            reason = f"{path.name}: {error.strerror}{self.advice}"
            raise ArtefactError(f"{self._whose(artefact)} cannot be read: {reason}") from error
        if hashlib.sha256(data).hexdigest() != artefact.sha256:
            reason = f"{path.name} is not what its digest says{self.advice}"
            raise ArtefactError(f"{self._whose(artefact)} is damaged: {reason}")
        return data

    def add(self, key: TuningKey, config: Mapping[str, Any], code: PortableCode) -> Artefact:
        """Keep compiled code, in place of what was there for this key and configuration."""
        digest = hashlib.sha256(code.data).hexdigest()
        artefact = Artefact(key, dict(config), code.format, digest, len(code.data), code.launch)
        code_path, record_path = self.files(artefact)
        make_folder(self.folder)
        self._write(code_path, code.data)
        text = json.dumps(artefact.to_dict(), sort_keys=True, separators=(",", ":"))
        self._write(record_path, text.encode())
        return artefact

    def remove(self, artefact: Artefact) -> None:
        """Forget an artefact, and its code where no other one has the same."""
        code_path, record_path = self.files(artefact)
        try:
            record_path.unlink(missing_ok=True)
            if all(other.sha256 != artefact.sha256 for other in self.all()):
                code_path.unlink(missing_ok=True)
        except OSError as error:
            raise ArtefactError(f"cannot remove {error.filename}: {error.strerror}; check the folder") from error

    def sweep(self) -> None:
        """Remove what killed processes left, and code that no record names, where it may be removed: nothing of the
        last hour, for the record of new code comes after it."""
        named = {artefact.sha256 for artefact in self.all()}
        old = time.time() - LEFT_AFTER_S
        try:
            found = list(self.folder.iterdir())
        except OSError:
            return
        for path in found:
            if path.name.startswith(NEW_PREFIX) or (path.suffix == CODE_SUFFIX and path.stem not in named):
                with suppress(OSError):  # another process was first
                    if path.lstat().st_mtime < old:
                        path.unlink()

    def prepare(self) -> None:
        """Make the folder; ArtefactError or CacheError where it cannot be written."""
        make_folder(self.folder)
        os.close(self._lock_file())

    @contextmanager
    def building(self, key_sha256: str, config: Mapping[str, Any], wait: bool = True) -> Iterator[bool]:
        """Hold the right to build one artefact against other processes; a process that ends gives it back.

        False where another one has it and ``wait`` is false. Each artefact is one byte of the folder's lock file. Where
        the file system locks nothing, everybody builds: files are whole all the same. Not to be nested: what a process
        closes it unlocks.
        """
        make_folder(self.folder)
        byte = int(artefact_id(key_sha256, config)[:12], 16)
        descriptor = self._lock_file()
        try:
            yield _lock(descriptor, byte, wait)
        finally:
            os.close(descriptor)

    def _lock_file(self) -> int:
        path = self.folder / LOCK_NAME
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ArtefactError(f"cannot write {path}: {error.strerror}; build in a writable folder") from error

    def _records(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.suffix == RECORD_SUFFIX)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ArtefactError(f"cannot read the folder {self.folder}: {error.strerror}; check its rights") from error

    def _record(self, path: Path) -> Artefact | None:
        try:
            artefact = Artefact.from_dict(json.loads(path.read_bytes()))
            if path.stem != artefact.id:
                raise ValueError("it is another entry's")
            return artefact
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            reason = f"{error.strerror}{self.advice}"
            raise ArtefactError(f"the artefact's record {path} cannot be read: {reason}") from error
        except (*MALFORMED, DmuonTuneError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ArtefactError(f"the artefact's record {path} is damaged: {reason}{self.advice}") from error

    def _whose(self, artefact: Artefact) -> str:
        return f"the artefact of {artefact.label()} in {self.folder}"

    def _write(self, path: Path, data: bytes) -> None:
        """All of a file or nothing; what is there and the same stays."""
        try:
            if path.exists() and path.read_bytes() == data:
                with suppress(OSError):  # another user's, which we only read
                    os.utime(path)  # no leftover while its record is written
                return
            descriptor, name = tempfile.mkstemp(prefix=NEW_PREFIX, dir=self.folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(name, 0o644)  # who may enter the folder may read it: another user's training too
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise ArtefactError(
                f"cannot write {path}: {error.strerror}; free some space or build in a writable folder"
            ) from error


def _lock(descriptor: int, byte: int, wait: bool) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # some network file systems lock nothing
    return True

"""Bundles: a cache and its artefacts as one tar file, the same bytes for the same contents on every machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sqlite3
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dmuon_tune.errors import CacheError, UsageError
from dmuon_tune.portable import PortableCode

from .artefacts import CODE_SUFFIX, FOLDER_NAME, RECORD_SUFFIX, Artefact, ArtefactError, ArtefactStore
from .contents import Contents, keep
from .database import is_bundle
from .paths import FILE_NAME
from .scratch import scratch_folder, told_of_scratch
from .sound import MALFORMED
from .store import Store

FORMAT = 1
MANIFEST = "bundle.json"
PAGE_BYTES = 4096
# SQLite's file header (sqlite.org/fileformat2.html, 1.3): place → what it counts of the writer, not of the contents.
CHANGES, VALID_FOR, LIBRARY_VERSION = 24, 92, 96
FIRST_STRICT_VERSION = 3037000  # of SQLite; any would do, but the library's own


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its database's file, and its artefacts."""

    database: Path
    artefacts: ArtefactStore


def write_bundle(
    path: str | Path, contents: Contents, artefacts: Iterable[tuple[ArtefactStore, Artefact]] = ()
) -> None:
    """Write these contents with these artefacts, each with the folder it lies in; of several of one name that of the
    least digest.

    Until all of it is there, what ``path`` held stays; a link's target is written. UsageError where it cannot be
    written or holds something else than a bundle, ArtefactError for a damaged artefact.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not _begins_as_bundle(target):  # a link in a circle too
        raise UsageError(f"cannot write the bundle {path}: what is there is no bundle; name a new file or a bundle")
    files = {FILE_NAME: database_bytes(contents.as_shipped())}
    by_digest = sorted(artefacts, key=lambda found: found[1].sha256, reverse=True)
    for store, artefact in {artefact.id: (store, artefact) for store, artefact in by_digest}.values():
        store.read(artefact)  # checks its digest
        files |= {f"{FOLDER_NAME}/{file.name}": file.read_bytes() for file in store.files(artefact)}
    listed = {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)}
    manifest = json.dumps({"format": FORMAT, "sha256": listed}, indent=1, sort_keys=True).encode()
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for name, content in [(MANIFEST, manifest), *((name, files[name]) for name in listed)]:
                    member = tarfile.TarInfo(name)  # time, owner and group 0: nothing of this machine
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except OSError as error:
        raise UsageError(
            f"cannot write the bundle {path}: {error.strerror}; name a file in a writable folder with some space"
        ) from error
    finally:
        with suppress(OSError):  # of a folder that cannot be written
            beside.unlink(missing_ok=True)


def take_artefacts(into: ArtefactStore, artefacts: Iterable[tuple[ArtefactStore, Artefact]]) -> int:
    """Copy what ``into`` does not have or has damaged, each from the folder it lies in; returns how many artefacts that
    were."""
    taken = 0
    for store, artefact in artefacts:
        if not _is_held(into, artefact):
            code = PortableCode(artefact.format, store.read(artefact), artefact.launch)
            into.add(artefact.key, artefact.config, code)
            taken += 1
    return taken


def _is_held(store: ArtefactStore, artefact: Artefact) -> bool:
    """Whether a folder has this code, undamaged."""
    try:
        known = store.find(artefact.key.sha256, artefact.config)
        return known is not None and known.code == artefact.code and bool(store.read(known))
    except ArtefactError:
        return False


def database_bytes(contents: Contents) -> bytes:
    """A database file of these contents, in their order, that readers need no side files for."""
    with scratch_folder() as folder, told_of_scratch(folder):
        path = folder / FILE_NAME
        with Store.open(path) as store:
            keep(store, lambda nothing: contents)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            # SQLAlchemy makes a table's indices in any order.
            wanted = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql > '' ORDER BY name"
            indices = connection.execute(wanted).fetchall()
            anew = [statement for name, sql in indices for statement in (f"DROP INDEX {name}", sql)]
            settings = ["journal_mode=DELETE", "secure_delete=ON", f"page_size={PAGE_BYTES}"]
            for statement in (*(f"PRAGMA {setting}" for setting in settings), *anew, "VACUUM"):
                connection.execute(statement).close()
        finally:
            connection.close()
        content = bytearray(path.read_bytes())
    for place, value in ((CHANGES, 1), (VALID_FOR, 1), (LIBRARY_VERSION, FIRST_STRICT_VERSION)):
        content[place : place + 4] = value.to_bytes(4, "big")
    return bytes(content)


@contextmanager
def opened_bundle(path: str | Path) -> Iterator[Bundle]:
    """A bundle's files in a folder that is gone afterwards. CacheError where it is damaged or of a newer format."""
    with scratch_folder() as folder:
        files = _checked_files(path)
        with told_of_scratch(folder):
            (folder / FOLDER_NAME).mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
        yield Bundle(folder / FILE_NAME, ArtefactStore(folder / FOLDER_NAME))


def _checked_files(path: str | Path) -> dict[str, bytes]:
    """Each file of a bundle but its manifest, whose digests they have."""
    advice = "export it again, or copy it anew"
    try:
        files = _files(path)
    except (OSError, tarfile.TarError, EOFError, ValueError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or repr(error)
        raise CacheError(f"cannot read the bundle {path}: {reason}; {advice}") from error
    manifest = _manifest(files.pop(MANIFEST, b""))
    if manifest is None:
        raise CacheError(f"{path} has no valid {MANIFEST}, so it is no bundle or damaged; {advice}")
    if manifest["format"] != FORMAT:
        raise CacheError(
            f"bundle {path} is of format {manifest['format']}, this dmuon-tune reads {FORMAT}; upgrade dmuon-tune"
        )
    foreign = [name for name in files if name != FILE_NAME and not _is_of_artefacts(PurePosixPath(name))]
    if foreign:
        raise CacheError(f"bundle {path} is damaged: it holds {foreign[0]!r}, which is no part of a bundle; {advice}")
    for name in sorted({*files, *manifest["sha256"]}):
        if hashlib.sha256(files.get(name, b"")).hexdigest() != manifest["sha256"].get(name):
            raise CacheError(f"bundle {path} is damaged: {name} is not what its {MANIFEST} says; {advice}")
    if FILE_NAME not in files:
        raise CacheError(f"bundle {path} holds no {FILE_NAME}; {advice}")
    return files


def _begins_as_bundle(path: Path) -> bool:
    """Whether a file may be written over: an archive of anything else may be someone's only copy."""
    if not is_bundle(path):
        return False
    try:
        with tarfile.open(path, "r:") as tar:
            first = tar.next()
    except (OSError, tarfile.TarError, EOFError, ValueError):
        return False
    return first is not None and first.name == MANIFEST


def _is_of_artefacts(name: PurePosixPath) -> bool:
    return str(name.parent) == FOLDER_NAME and name.suffix in (RECORD_SUFFIX, CODE_SUFFIX)


def _manifest(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        sound = isinstance(found["format"], int) and isinstance(found["sha256"], dict)
    except MALFORMED:
        return None
    return found if sound else None


def _files(path: str | Path) -> dict[str, bytes]:
    """Each member's content: plain files below the bundle's root alone, whoever made it."""
    found: dict[str, bytes] = {}
    size_bytes = os.path.getsize(path)
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if member.size > size_bytes:  # else a sparse file of no bytes here would fill the memory
                raise ValueError(f"its {member.name!r} is said to be larger than all of it")
            file = tar.extractfile(member) if member.isreg() and not member.issparse() else None
            if file is None or name.is_absolute() or ".." in name.parts or str(name) in found:
                raise ValueError(f"it holds {member.name!r}, which is no plain file of a bundle")
            found[str(name)] = file.read()
    return found

"""Where caches lie: the user's file, the site's and those an environment lists, without touching any."""

from __future__ import annotations

import itertools
import os
import pwd
import re
import stat
from collections.abc import Mapping
from pathlib import Path

FILE_NAME = "cache.sqlite"
FOLDER_NAME = "dmuon-tune"
CACHE_DIR_VARIABLE = "DMUON_TUNE_CACHE_DIR"
CACHE_PATH_VARIABLE = "DMUON_TUNE_CACHE_PATH"
URL_PATTERN = re.compile(r"[a-z][a-z0-9]*(\+[a-z0-9]+)?://")
LISTED_PATTERN = re.compile(rf"(?:{URL_PATTERN.pattern.replace('(', '(?:')})[^/]*(?:/[^:]*)?|[^:]+")  # URLs hold colons
SITE_DIR = Path("/opt") / FOLDER_NAME
DEFAULT_DATA_DIRS = "/usr/local/share:/usr/share"  # XDG Base Directory Specification 0.8


def user_cache_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The only file that is ever written: ``DMUON_TUNE_CACHE_DIR``, else XDG's cache folder, else ``~/.cache``.

    Without HOME the password database is asked; for a user it does not know, a folder of that user in TMPDIR.
    """
    if folder := environ.get(CACHE_DIR_VARIABLE):
        return Path(os.path.expanduser(folder)).absolute() / FILE_NAME
    xdg = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification ignores relative folders
        return Path(xdg) / FOLDER_NAME / FILE_NAME
    home = environ.get("HOME") or _home_of_password_database()
    if home:
        return Path(home).absolute() / ".cache" / FOLDER_NAME / FILE_NAME
    return _folder_among_others(Path(environ.get("TMPDIR") or "/tmp").absolute()) / FILE_NAME


def _folder_among_others(parent: Path) -> Path:
    """This user's folder where everybody may make folders: of the next name where someone else has made that one, who
    could have put anything there, compiled code too."""
    name = f"{FOLDER_NAME}-{os.getuid()}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder for folder in map(parent.joinpath, names) if _is_free_or_own(folder))


def _is_free_or_own(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return True
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not writable_by_others


def _home_of_password_database() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def site_cache_paths(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The files an administrator or an image may provide, in order: ``/opt/dmuon-tune``, then XDG's data folders."""
    folders = (environ.get("XDG_DATA_DIRS") or DEFAULT_DATA_DIRS).split(os.pathsep)
    return [SITE_DIR / FILE_NAME] + [
        Path(folder) / FOLDER_NAME / FILE_NAME for folder in folders if os.path.isabs(folder)
    ]


def listed_caches(environ: Mapping[str, str] = os.environ) -> list[Path | str]:
    """What ``DMUON_TUNE_CACHE_PATH`` lists, separated by colons: files (a folder stands for the cache file in it) and
    servers' URLs, each with a database's name: ``/opt/a.sqlite:postgresql+psycopg://reader@db:5432/muon``."""
    found: list[Path | str] = []
    for part in LISTED_PATTERN.findall(environ.get(CACHE_PATH_VARIABLE, "")):
        path = Path(os.path.expanduser(part)).absolute()
        found.append(part if URL_PATTERN.match(part) else path / FILE_NAME if os.path.isdir(path) else path)
    return found

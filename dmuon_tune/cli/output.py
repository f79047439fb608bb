"""Prints results: plain aligned tables or JSON on stdout, everything else on stderr."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dmuon_tune.errors import DmuonTuneError, UsageError
from dmuon_tune.words import table as table


class OutputError(DmuonTuneError):
    """Stdout takes no more, such as on a full disk. Exit code 1."""


def microseconds(value: float | None) -> str | None:
    """Four significant digits, no exponent; None stays None."""
    if value is None:
        return None
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def ratio(baseline: float | None, value: float | None) -> str | None:
    """How many times faster ``value`` is than ``baseline``, such as ``1.24x``."""
    return None if not baseline or not value else f"{baseline / value:.2f}x"


def config_text(config: dict[str, Any]) -> str:
    """``key=value`` pairs in field order."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def print_json(value: Any) -> None:
    say(json.dumps(value, indent=2, default=str))


def say(text: str = "") -> None:
    """Results: stdout; OutputError where it cannot be written."""
    with _stdout_errors():
        print(text)


def flush() -> None:
    """Write what is buffered now, while a failure can still be said."""
    with _stdout_errors():
        sys.stdout.flush()


@contextmanager
def _stdout_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise OutputError(
            f"cannot write the results: {error.strerror}; free some space or send stdout to another place"
        ) from error


def drop_stdout() -> None:
    """What is still buffered goes nowhere: Python flushes at exit once more and would print a second complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_streams() -> None:
    """A stream that the caller closed (``>&-``) becomes the null device, for worker processes too.

    Else the next file to be opened, such as the cache, would get the stream's descriptor and what is printed to it.
    Characters that stdout's encoding lacks are escaped.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor: this one
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def note(text: str, program: str = "dmuon-tune") -> None:
    """Information for a person: stderr, one line; where stderr is full, nobody can be told."""
    with suppress(OSError):
        print(f"{program}: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    note(f"warning: {text}")


class LogLines(logging.Handler):
    """The library's log records (such as an unreadable cache layer) as the command line's own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname.lower()}: {record.getMessage()}")


def check_writable(option: str, path: Path) -> None:
    """UsageError before long work where ``write_file`` could not keep what it finds."""
    folder = next(above for above in path.absolute().parents if os.path.exists(above))  # the others are made
    try:
        path.stat()
        is_writable = os.access(folder if path.is_file() else path, os.W_OK) and not path.is_dir()
    except FileNotFoundError:
        is_writable = os.access(folder, os.W_OK)
    except OSError:  # the name is too long, what should be a folder is a file, a folder may not be entered
        is_writable = False
    if not is_writable:
        raise UsageError(f"{option} {path} cannot be written; name a file in a writable folder")


def write_file(path: Path, content: bytes) -> None:
    """All of it or nothing: a file that there was stays until the new one is complete. UsageError where it cannot be
    written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_bytes(content)  # a device or pipe; a folder raises
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; name another place") from error

"""The errors users see: one line each, with the exit code the command line returns."""

from __future__ import annotations

from traceback import walk_tb


class DmuonTuneError(Exception):
    """A failure said in one line: what, where, and what to do next. Exit code 1."""

    exit_code = 1


class UsageError(DmuonTuneError):
    """Input that cannot be used as given (shape text, preset, dtype, file). Exit code 2."""

    exit_code = 2


class MissingEntryError(DmuonTuneError):
    """A required cache entry does not exist (``DMUON_TUNE_ON_MISS=error``). Exit code 3."""

    exit_code = 3


class CacheError(DmuonTuneError):
    """The cache is corrupt, of a newer schema, read-only or locked. Exit code 4."""

    exit_code = 4


class PeerError(DmuonTuneError):
    """Another rank failed, is elsewhere in the program, or did not arrive in time. Exit code 1."""


class NoLegalConfigError(DmuonTuneError):
    """No configuration of any kernel is legal for a problem on this device. Exit code 5."""

    exit_code = 5


INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it
TERMINATED_EXIT_CODE = 143  # 128 + SIGTERM


def said(error: BaseException) -> str:
    """What someone else's exception says, in one line: ``SystemExit: 7``; a missing module's own words alone."""
    try:
        text = " ".join(str(error).split())[:200]
    except Exception:
        text = ""
    if isinstance(error, ModuleNotFoundError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def raised(error: BaseException, module: str) -> str:
    """The same, and at which line of a module's code that is asked: the innermost one."""
    places = [
        f" at {frame.f_code.co_filename}:{line}"
        for frame, line in walk_tb(error.__traceback__) if frame.f_globals.get("__name__") == module
    ]
    return said(error) + "".join(places[-1:])


def outcome(error: Exception) -> tuple[int, str]:
    """The exit code of an error that ends a program, and the line that it says."""
    if isinstance(error, DmuonTuneError):
        return error.exit_code, "error: " + " ".join(str(error).split())
    return 1, f"error: {said(error)}; --debug shows where"

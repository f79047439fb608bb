"""The command line: parses, runs one command, and turns every error into one line and an exit code."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence

from dmuon_tune.errors import DmuonTuneError

from .output import LogLines, drop_stdout, flush, note, open_missing_streams
from .parser import build

BROKEN_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE, as shells report it


def run(argv: Sequence[str] | None) -> int:
    """Run one command (None: the process's own arguments) and return its exit code; KeyboardInterrupt passes."""
    open_missing_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    logger, lines = logging.getLogger("dmuon_tune"), LogLines(logging.WARNING)
    logger.addHandler(lines)
    try:
        return _run(arguments)
    except BrokenPipeError:
        drop_stdout()
        return BROKEN_PIPE_EXIT_CODE
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        expected = isinstance(error, DmuonTuneError)
        said = str(error) if expected else f"{type(error).__name__}: {error}; --debug shows where"
        note("error: " + " ".join(said.split()))
        return error.exit_code if isinstance(error, DmuonTuneError) else 1
    finally:
        logger.removeHandler(lines)


def _run(arguments: list[str]) -> int:
    code: int
    try:
        args = build().parse_args(arguments)
        code = args.run(args)
    except SystemExit as stop:  # argparse, after --help and --version
        code = stop.code if isinstance(stop.code, int) else 0
    flush()
    return code

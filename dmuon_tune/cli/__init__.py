"""The command line: parses, runs one command, and turns every error into one line and an exit code."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence

from dmuon_tune.errors import INTERRUPTED_EXIT_CODE, DmuonTuneError

from .output import LogLines, drop_stdout, flush, note, open_missing_streams
from .parser import build

BROKEN_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failure, 2 usage, 3 a required entry is missing, 4 cache
    corrupt, incompatible or locked, 5 no legal configuration, 130 interrupted, 141 stdout closed."""
    open_missing_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    logger, lines = logging.getLogger("dmuon_tune"), LogLines(logging.WARNING)
    logger.addHandler(lines)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED_EXIT_CODE
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

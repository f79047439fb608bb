"""The command line: parses, runs one command, and turns every error into one line and an exit code."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Sequence

from dmuon_tune.errors import outcome

from .output import LogLines, drop_stdout, flush, note, prepare_streams
from .parser import build

DEBUG = "--debug"  # every command has it
BROKEN_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE, as shells report it


def run(argv: Sequence[str] | None) -> int:
    """Run one command (None: the process's own arguments) and return its exit code; KeyboardInterrupt passes."""
    prepare_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    logger, lines = logging.getLogger("dmuon_tune"), LogLines(logging.WARNING)
    logger.addHandler(lines)

    def command() -> int:
        args = build().parse_args(arguments)
        code: int = args.run(args)
        return code

    try:
        return guarded(command, "dmuon-tune", DEBUG in arguments)
    finally:
        logger.removeHandler(lines)


def guarded(command: Callable[[], int], program: str, debug: bool) -> int:
    """Exit code of a program's command; an error is its one line on stderr, under its traceback with ``debug``.

    KeyboardInterrupt passes.
    """
    try:
        try:
            code = command()
        except SystemExit as stop:  # argparse, after --help and --version
            code = stop.code if isinstance(stop.code, int) else 0
        flush()
        return code
    except BrokenPipeError:
        drop_stdout()
        return BROKEN_PIPE_EXIT_CODE
    except Exception as error:
        if debug:
            traceback.print_exc()
        code, line = outcome(error)
        note(line, program)
        return code

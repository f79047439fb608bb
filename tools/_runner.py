"""Runs one of these programs: an error is one line on stderr and the exit code that the command line documents."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dmuon_tune.cli.output import note as note
from dmuon_tune.cli.parser import Parser as Parser  # whose error is one line too
from dmuon_tune.cli.program import DEBUG, guarded
from dmuon_tune.errors import INTERRUPTED_EXIT_CODE, UsageError


def run(program: str, main: Callable[[Sequence[str]], int]) -> int:
    """Exit code of ``main`` on this process's arguments; ``--debug``, which it is not given, shows tracebacks."""
    arguments = [each for each in sys.argv[1:] if each != DEBUG]
    try:
        return guarded(lambda: main(arguments), program, DEBUG in sys.argv)
    except KeyboardInterrupt:
        note("interrupted", program)
        return INTERRUPTED_EXIT_CODE


def check_writable(option: str, path: Path | None) -> None:
    """UsageError before long work whose results would have no file."""
    if path and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise UsageError(f"{option} {path}: name a file in an existing folder that can be written")

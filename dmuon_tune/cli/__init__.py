"""The command line's entry: an interrupt is one line, also while the program is still being imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from dmuon_tune.errors import INTERRUPTED_EXIT_CODE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failure, 2 usage, 3 a required entry is missing, 4 cache
    corrupt, incompatible or locked, 5 no legal configuration, 130 interrupted, 141 stdout closed, 143
    terminated."""
    try:
        from .program import run

        return run(argv)
    except KeyboardInterrupt:
        with suppress(OSError):  # a full stderr
            print("dmuon-tune: interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE

"""Runs the command line as ``python -m dmuon_tune``."""

from __future__ import annotations

import sys

from dmuon_tune.cli import main

if __name__ == "__main__":  # spawned workers import this module again
    sys.exit(main())

"""Builds the argument parser from one file a command; imports nothing heavy."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from dmuon_tune import __version__
from dmuon_tune.errors import UsageError

from . import caches, doctor, explain, plan, replay, report, restarts, shapes, show, tune
from .output import say

EPILOG = """exit codes: 0 ok, 1 failure, 2 usage, 3 a required entry is missing,
4 cache corrupt, incompatible or locked, 5 no legal configuration, 130 interrupted"""


class Parser(argparse.ArgumentParser):
    """Reports a usage error as every other error: one line and exit code 2. Options are written out, in every command:
    what an abbreviation means could change with the next option."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "allow_abbrev": False})
        # No option begins with a number: ``-5s`` is a value, which its own type refuses in its own words.
        self._negative_number_matcher = re.compile(r"-\d")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")

    def _print_message(self, message: str, file: Any = None) -> None:
        say(message.removesuffix("\n"))  # argparse's own swallows a failure to write


def build() -> Parser:
    parser = Parser(
        prog="dmuon-tune",
        description="Tune the kernels of Muon's Newton-Schulz step for a model's matrix shapes, and keep the results.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dmuon-tune {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (shapes, tune, show, report, explain, plan, restarts, caches, replay, doctor):
        command.register(commands)
    return parser

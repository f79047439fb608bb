"""Counts in messages have the right plural, wherever one is printed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dmuon_tune.words import counted, ranks_named, shown

ROOT = Path(__file__).resolve().parent.parent
# A number of these is said by ``counted``: written after a value that may be 1, the word would be wrong.
NOUNS = "byte|chain|configuration|GPU|group|matrice|parameter|piece|problem|product|recipe|result|shape|step"
PLAIN = re.compile(rf"\x00 (whole )?({NOUNS})(s\b|\(s\))")
FILES = [path for top in ("dmuon_tune", "cache", "runtime", "tools") for path in sorted((ROOT / top).rglob("*.py"))]


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (1, ("result",), "1 result"), (2, ("result",), "2 results"), (0, ("result",), "0 results"),
        (1, ("matrix", "matrices"), "1 matrix"), (3, ("matrix", "matrices"), "3 matrices"),
    ],
)
def test_counted(count: int, words: tuple[str, ...], said: str) -> None:
    assert counted(count, *words) == said


def test_shown_is_one_short_line() -> None:
    assert shown("a\nb") == r"'a\nb'" and len(shown("x" * 1000)) < 60 and "\n" not in shown([[0] * 50] * 50)


def bare_counts(source: str) -> list[str]:
    """Texts of f-strings that write a plural after a value; ``\\0`` stands for the value, N for a constant."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else _place(part) for part in node.values)
            found += [text] if PLAIN.search(text) else []
    return found


def _place(part: ast.FormattedValue) -> str:
    return "N" if isinstance(part.value, ast.Name) and part.value.id.isupper() else "\0"


def test_the_check_sees_a_bare_count() -> None:
    assert bare_counts('note(f"{n} results measured, {m} reused")') and bare_counts('f"sees {n} GPU(s)"')
    assert not bare_counts('''note(f"{counted(n, 'result')} measured")''')


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_message_counts_without_the_singular(path: Path) -> None:
    assert bare_counts(path.read_text(encoding="utf-8")) == []


def test_ranks_are_named_in_spans() -> None:
    assert ranks_named([3]) == "rank 3" and ranks_named([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"

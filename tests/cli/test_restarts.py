"""``restarts``: the search on the command line."""

from __future__ import annotations

import pytest

from dmuon_tune.coefficients import COEFFICIENTS
from dmuon_tune.restarts import choose_restarts

from .conftest import Run


def test_a_known_set(run: Run) -> None:
    result = run("restarts", "--coefficients", "jordan", "--steps", "7")
    assert result.code == 0 and "restarts=(2, 4)" in result.err
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0] == ["count", "restarts", "growth", "chosen"] and lines[1][:2] == ["0", "none"]
    assert [line[1] for line in lines if line[-1] == "yes"] == ["2,4"]


def test_given_triples_in_json(run: Run) -> None:
    triples = COEFFICIENTS["you"].triples
    found = run(
        "restarts", "--coefficients", ";".join(",".join(map(str, triple)) for triple in triples), "--format", "json"
    ).json
    assert found["steps"] == 5 and tuple(found["restarts"]) == choose_restarts(COEFFICIENTS["you"], 5)
    assert [row["count"] for row in found["best"]] == [0, 1, 2]
    assert run("restarts", "--coefficients", "3.4445,-4.7750,2.0315", "--steps", "9", "--format", "json").json[
        "best"][0]["growth"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("--coefficients", "best"), ("--coefficients", "1,2"), ("--coefficients", "you", "--steps", "9"),
        ("--steps", "0"), ("--perturbation=0.5",), ("--perturbation=nan",),
    ],
)
def test_what_cannot_be_is_one_line_and_code_2(run: Run, arguments: tuple[str, ...]) -> None:
    result = run("restarts", *arguments)
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1 and "error: " in result.err

"""A record file that anyone may have edited is replayed, or refused in one line that says what is wrong in it."""

from __future__ import annotations

import copy
import gzip
import json
import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmuon_tune.errors import UsageError
from dmuon_tune.search.record import FORMAT, Record
from dmuon_tune.search.replay import Curve, replay
from dmuon_tune.search.samplers import samplers

GOOD: dict[str, Any] = {"format": FORMAT, **asdict(Record(
    "gram 1x8", "gram.library", "cpu", {"tile": [16, 32, 96], "swizzle": [False, True]},
    [[0, 0], [0, 1], [1, 0], [2, 1]], [4.0, None, 2.0, 8.0], [1], [1.0, None, 2.0, 3.0], [0.5, None, 0.25, 0.5],
))}
ODD = st.sampled_from([
    None, True, False, 0, 1, -1, 7, 0.0, 0.5, -2.0, 1e300, 10**400, math.nan, math.inf, -math.inf, "", "text", [], {},
    [None], [0, 0], [[]], {"a": 1},
])


def written(path: Path, fields: Any) -> Path:
    path.write_bytes(gzip.compress(json.dumps(fields).encode()))
    return path


def replayed(path: Path) -> list[Curve]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curves = replay([Record.read(path)], sorted(samplers()), 4, 2)
        for curve in curves:
            assert 0 <= min(curve.at(1)) <= 1 and curve.evaluations_to(0.97) is not None
            assert curve.seconds_to(0.97) is None or curve.seconds is not None
    return curves


def changed(data: st.DataObject) -> Any:
    """The good record with one to three changes, each at any depth."""
    fields = copy.deepcopy(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = fields
        while True:
            places = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not places:
                break
            place = data.draw(st.sampled_from(places))
            if isinstance(at[place], list | dict) and data.draw(st.booleans()):
                at = at[place]
                continue
            change = data.draw(st.sampled_from(["drop", "put", "twice"]))
            if change == "drop":
                del at[place]
            elif change == "put":
                at[place] = copy.deepcopy(data.draw(ODD))
            elif isinstance(at, list):
                at.append(copy.deepcopy(at[place]))
            else:
                at[f"{place}_"] = at[place]
            break
    return fields


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_leaves_a_record_that_replays_or_one_line(tmp_path: Path, data: st.DataObject) -> None:
    path = written(tmp_path / "record.json.gz", changed(data))
    try:
        Record.read(path)
    except UsageError as error:
        assert str(path) in str(error) and "\n" not in str(error) and error.exit_code == 2
    else:
        replayed(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"problem": 3}, "problem must be a text, not 3"),
        ({"axes": []}, "axes must be an object"),
        ({"axes": {"tile": [], "swizzle": [0]}}, r"axes\['tile'\] = \[\] must hold values that differ"),
        ({"axes": {"tile": [1, 1], "swizzle": [0]}}, r"axes\['tile'\] = \[1, 1\] must hold values that differ"),
        ({"axes": {"tile": [[1]], "swizzle": [0]}}, r"axes\['tile'\]\[0\] must be a text"),
        ({"rows": []}, "rows is empty"),
        ({"rows": [[0, 0], [0, 1], [1], [2, 1]]}, r"rows\[2\] = \[1\] must have a place on each of 2 axes"),
        ({"rows": [[0, 0], [0, 2], [1, 0], [2, 1]]}, r"rows\[1\] = \[0, 2\]"),
        ({"rows": [[0, 0], [0, -1], [1, 0], [2, 1]]}, r"rows\[1\] = \[0, -1\]"),
        ({"rows": [[0, 0], [0, 1], [0, 0], [2, 1]]}, "rows holds a configuration twice"),
        ({"times_us": [1.0]}, "times_us has 1 items for 4 rows"),
        ({"times_us": [None] * 4}, "times_us holds no time"),
        ({"times_us": [1.0, math.nan, 2.0, 3.0]}, r"times_us\[1\] must be a time above 0 or null, not nan"),
        ({"times_us": [1.0, -2.0, 2.0, 3.0]}, r"times_us\[1\] must be"),
        ({"times_us": [1.0, "2", 2.0, 3.0]}, r"times_us\[1\] must be a time above 0 or null, not '2'"),
        ({"first": [4]}, r"first\[0\] must be a row's number, 0 to 3, not 4"),
        ({"compile_s": [1.0]}, "compile_s has 1 items for 4 rows"),
        ({"run_s": [1.0, math.inf, 2.0, 3.0]}, r"run_s\[1\] must be seconds"),
    ],
)
def test_the_line_says_what_is_wrong(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = written(tmp_path / "record.json.gz", GOOD | change)
    with pytest.raises(UsageError, match=f"record.json.gz is a damaged record: {said}.*; write one with "):
        Record.read(path)


@pytest.mark.parametrize("text", ["[" * 10**5, "3", "[]", "null", '{"format": 1}', "{"])
def test_what_is_no_record_at_all_is_said_as_that(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(UsageError, match=r"record\.json\.gz is no record of this version"):
        Record.read(tmp_path / "record.json.gz")


@pytest.mark.parametrize("unknown", [{"compile_s": [None] * 4}, {"run_s": [None] * 4}, {"compile_s": []}])
def test_where_no_cost_is_known_no_seconds_are_told(tmp_path: Path, unknown: dict[str, Any]) -> None:
    assert all(curve.seconds is None for curve in replayed(written(tmp_path / "record.json.gz", GOOD | unknown)))
    assert all(curve.seconds is not None for curve in replayed(written(tmp_path / "record.json.gz", GOOD)))

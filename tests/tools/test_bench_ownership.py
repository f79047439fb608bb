"""tools/bench_ownership.py: its table and JSON, and what the instances are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def test_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import bench_ownership

    work = bench_ownership.instance(3)
    assert len(work) == 400 and len({item.costs for item in work}) == 12 and work == bench_ownership.instance(3)
    assert bench_ownership.main(["--instances", "2", "--seconds", "0.1", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["owners"] for row in rows] == [8, 16]
    for row in rows:
        assert row["bound_us"] <= row["makespan_us"] <= row["longest_first_us"]
    assert bench_ownership.main(["--instances", "1", "--seconds", "0"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["seed", "owners"]
    sys.modules.pop("bench_ownership")

"""What of some spans lies under others, and a trace that is written where there is no GPU."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    import _bench_trace

    yield _bench_trace


def test_spans_are_counted_as_their_microseconds_are(trace: Any) -> None:
    rng = random.Random(0)
    for _ in range(50):
        groups = []
        for count in (rng.randrange(8), rng.randrange(8)):
            begins = [rng.randrange(60) for _ in range(count)]
            groups.append([(begin, begin + rng.randrange(1, 9)) for begin in begins])
        these, those = ({us for begin, end in spans for us in range(begin, end)} for spans in groups)
        one, other = map(trace.joined, groups)
        assert sum(end - begin for begin, end in one) == len(these)
        assert trace.shared_us(one, other) == len(these & those)


def test_kernels_of_nccl_and_copies_between_gpus_are_communication(trace: Any) -> None:
    events = [
        {"cat": "kernel", "name": "ncclDevKernel_Broadcast", "ts": 0.0, "dur": 10.0},
        {"cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": 20.0, "dur": 10.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "ts": 0.0, "dur": 100.0},
        {"cat": "kernel", "name": "gemm", "ts": 5.0, "dur": 17.0},
        {"cat": "gpu_user_annotation", "name": "Muon: chain", "ts": 0.0, "dur": 100.0}, {"ph": "M"},
    ]
    assert trace.communication(events) == (20.0, (5 + 2) / 20)
    assert trace.communication([]) == (0.0, 1.0)


def test_a_trace_is_drawn(trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                          capsys: pytest.CaptureFixture[str]) -> None:
    import _runner
    import plot_trace

    names = ("gemm", "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_f32", "ncclDevKernel_SendRecv")
    events = [{"cat": "kernel", "name": name, "ts": 1e6 + 1000.0 * place, "dur": 1500.0}
              for place, name in enumerate(names)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    given = [str(tmp_path / "trace.json"), "--out", str(tmp_path / "out.svg")]
    monkeypatch.setattr(sys, "argv", ["plot_trace", *given, "--to", "4"])
    assert _runner.run("plot_trace", plot_trace.main) == 0
    drawn = (tmp_path / "out.svg").read_text()
    assert all(f">{lane}<" in drawn for lane in ("computation", "to all", "sums", "between two", "ms"))
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": []}))
    assert _runner.run("plot_trace", plot_trace.main) == 2
    assert "no GPU's kernels" in capsys.readouterr().err


def test_a_cpu_has_a_trace_and_no_share(trace: Any, tmp_path: Path) -> None:
    x = torch.ones(8, 8)
    assert trace.traced(lambda: x @ x, torch.device("cpu"), 2, tmp_path / "trace.json") is None
    names = [event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert names.count("aten::mm") == 2

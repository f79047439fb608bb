"""Timing protocols on real launches."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.measure import rotation, timing, verify
from dmuon_tune.problem import Problem

GRAM = ops()["gram"]
HOG = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_cpu_windows_rotate_buffers_and_slow_launches_get_fewer() -> None:
    problem = Problem("gram", 1, 64, 64, 64, "float32", "float32")
    addresses = set()

    def launch(x: torch.Tensor, r: torch.Tensor, alpha: float) -> None:
        addresses.add(x.data_ptr())
        r.copy_(x)  # a product would wait for other processes' threads on a busy machine

    fast = timing.time_launch(launch, GRAM, problem, "cpu", fingerprint("cpu"), 0)
    assert len(fast.samples_us) >= timing.CPU_MIN_WINDOWS and fast.launches > 1
    assert len(addresses) == fast.sets > 1

    slow = timing.time_launch(lambda *_: time.sleep(0.2), GRAM, problem, "cpu", fingerprint("cpu"), 0)
    assert (slow.launches, slow.sets, len(slow.samples_us)) == (1, 1, timing.CPU_MIN_WINDOWS)
    assert all(sample >= 200_000 for sample in slow.samples_us)


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Another process on every processor."""
    cores = os.sched_getaffinity(0)
    hogs = [subprocess.Popen([sys.executable, "-c", HOG, str(core)]) for core in cores]
    time.sleep(0.3)
    yield
    os.sched_setaffinity(0, cores)
    for hog in hogs:
        hog.kill()
        hog.wait()


def test_what_a_busy_machine_always_disturbs_is_said(busy_machine: None) -> None:
    def launch(*_: object) -> None:
        end = time.perf_counter() + 0.1
        while time.perf_counter() < end:
            pass

    problem = Problem("gram", 1, 64, 64, 64, "float32", "float32")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    timed = timing.time_launch(launch, GRAM, problem, "cpu", fingerprint("cpu"), 0)
    assert timed.contended and len(timed.samples_us) == timing.CPU_MIN_WINDOWS


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", ["gram", "gemm_symmetric", "apply"])
def test_scalars_keep_a_single_entry_away_from_cancellation(op: str, dtype: str) -> None:
    epilogue = {"gram": "none", "gemm_symmetric": "ci", "apply": "c"}[op]
    problem = Problem(op, 1, 1, 1, 1, dtype, dtype, "row", epilogue)
    for seed in range(50):
        scalars = verify.random_scalars(ops()[op], problem, seed)
        assert len(set(scalars)) == len(scalars) and not {0.0, 1.0} & set(scalars)
        result = ops()[op].reference(problem, *ops()[op].make_inputs(problem, "cpu", seed), *scalars)
        if op == "gemm_symmetric":
            assert abs(float(result)) > 0.2


@gpu
@needs_gpu
def test_cuda_graph_times_agree_with_events() -> None:
    problem = Problem("gram", 1, 2048, 2048, 2048)
    x = torch.randn(1, 2048, 2048, device="cuda", dtype=torch.float16)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(20):
        torch.bmm(x, x.mT)
    begin.record()
    for _ in range(50):
        torch.bmm(x, x.mT)
    end.record()
    torch.cuda.synchronize()
    expected_us = begin.elapsed_time(end) * 1000 / 50
    timed = timing.time_launch(_bmm, GRAM, problem, "cuda", fingerprint("cuda"), 0)
    assert len(timed.samples_us) == timing.WINDOWS and timed.sets > 1
    assert expected_us / 2 < sorted(timed.samples_us)[7] < expected_us * 2


@gpu
@needs_gpu
def test_a_launch_on_another_stream_is_found_out() -> None:
    problem = Problem("gram", 1, 256, 256, 256)
    side = torch.cuda.Stream()

    def launch(x: torch.Tensor, r: torch.Tensor, alpha: float) -> None:
        if not torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(side):
                _bmm(x, r, alpha)

    with pytest.raises(RuntimeError, match="current stream"):
        timing.time_launch(launch, GRAM, problem, "cuda", fingerprint("cuda"), 0)


@gpu
@needs_gpu
@pytest.mark.parametrize("epilogue", ["none", "c", "i", "ci"])
def test_the_library_verifies_on_the_gpu(epilogue: str) -> None:
    from dmuon_tune.kernel_specs import kernel
    from dmuon_tune.measure.build import compile_kernel

    spec, device = kernel("gemm_symmetric.library"), fingerprint("cuda")
    problem = Problem("gemm_symmetric", 3, 129, 129, 129, epilogue=epilogue)
    compiled = compile_kernel(spec, problem, spec.untuned(problem, device), device)
    for seed in range(5):
        assert not verify.verify(compiled.launch, ops()["gemm_symmetric"], problem, "cuda", seed).failure


def _bmm(x: torch.Tensor, r: torch.Tensor, alpha: float) -> None:
    torch.baddbmm(r, x, x.mT, beta=0, alpha=alpha, out=r)


class Graph:
    """Stands in for a CUDA graph of launches on these arguments."""

    def __init__(self, launch: Any, sets: list[list[Any]]) -> None:
        self._launch, self._sets = launch, sets

    def replay(self) -> None:
        for arguments in self._sets:
            self._launch(*arguments)


@pytest.mark.parametrize(("op", "epilogue"), [("apply", "none"), ("apply", "w"), ("momentum", "n")])
def test_a_graph_that_writes_nothing_is_refused(op: str, epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    problem = Problem(op, 2, 8, 16, 8 if op == "apply" else 1, "float32", "float32", "row", epilogue)
    spec, device = kernel(f"{op}.library"), fingerprint("cpu")
    launch = spec.build(problem, spec.untuned(problem, device), device)
    sets = rotation.cold_sets(ops()[op], problem, "cpu", device, 0)[1](2)
    written = sets.written(Graph(launch, sets.launched), 2)  # type: ignore[arg-type]
    sets.require_alike(written, 2)
    with pytest.raises(RuntimeError, match="does not write its outputs"):
        sets.written(Graph(lambda *_: None, sets.launched), 2)  # type: ignore[arg-type]


def test_a_graph_of_fewer_launches_than_sets_is_looked_at_where_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a slower entrant's of a race is, beside a faster one whose window has more launches."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    problem = Problem("gram", 2, 8, 8, 16, "float32", "float32")
    sets = rotation.cold_sets(GRAM, problem, "cpu", fingerprint("cpu"), 0)[1](4)
    assert len(sets) == 4
    for launches in range(1, 5):
        sets.written(Graph(_bmm, sets.launched[:launches]), launches)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="does not write its outputs"):
            sets.written(Graph(_bmm, sets.launched[: launches - 1]), launches)  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", range(3))
def test_one_launch_that_differs_in_one_bit_is_found_among_the_sets_that_were_launched_on(odd: int) -> None:
    problem = Problem("gram", 2, 8, 8, 16, "float16", "float16")
    sets = rotation.cold_sets(GRAM, problem, "cpu", fingerprint("cpu"), 0)[1](4)
    for arguments in sets.launched[:3]:
        _bmm(*arguments)
    written = [each.clone() for each in sets.outputs[0]]
    sets.require_alike(written, 3)  # though the fourth holds anything
    sets.outputs[odd][0].view(torch.uint8)[1, 7, 3] ^= 1
    with pytest.raises(rotation.UnlikeResults, match="3 in turn"):
        sets.require_alike(written, 3)


def test_what_is_updated_in_place_is_not_compared() -> None:
    problem = Problem("momentum", 2, 8, 16, 1, "float32", "float32", "row", "n")
    sets = rotation.cold_sets(ops()["momentum"], problem, "cpu", fingerprint("cpu"), 0)[1](2)
    assert sets.updated[0]
    sets.require_alike([torch.full_like(each, torch.nan) for each in sets.outputs[0]], 2)


@gpu
@needs_gpu
@pytest.mark.parametrize("size", [64, 2048])
def test_a_kernel_that_races_now_and_then_is_no_measurement(size: int) -> None:
    problem, calls = Problem("gram", 1, size, size, size), iter(range(10**6))

    def launch(x: torch.Tensor, r: torch.Tensor, alpha: float) -> None:
        _bmm(x, r, alpha)
        if next(calls) % 7 == 6:  # one captured launch in seven
            r[0, 0, 0] *= 1.5

    with pytest.raises(rotation.UnlikeResults, match="differ"):
        timing.time_launch(launch, GRAM, problem, "cuda", fingerprint("cuda"), 0)

"""Times a launch: windows of many calls over rotating buffers, by CUDA graph on a GPU and by clock on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import OpSpec

from .verify import in_launch_order, random_scalars

WINDOWS = 15
COLD_L2_MULTIPLE = 3  # rotating over this many cache sizes leaves no operand of the next call in the cache
GPU_WINDOW_US = 1_000.0
GPU_BURN_IN_US = 20_000.0
GPU_TOTAL_US = 1_000_000.0
GPU_MIN_WINDOWS = 5
GPU_MAX_LAUNCHES = 1024
CPU_WINDOW_US = 2_000.0
CPU_TOTAL_US = 500_000.0
CPU_MIN_WINDOWS = 3
CPU_MAX_LAUNCHES = 1024
CPU_BUFFER_BYTES = 256 * 2**20  # last-level caches of shared servers reach 500 MB: copying 3× that is not worth it
MEMORY_SHARE = 0.5  # of the GPU's free memory for rotating buffers


@dataclass(frozen=True)
class Timing:
    """``samples_us``: microseconds a call, one for each window of ``launches`` calls over ``sets`` sets of buffers."""

    samples_us: list[float]
    launches: int
    sets: int


def time_launch(
    launch: Callable[..., Any], op: OpSpec, problem: Problem, device: str, fingerprint: DeviceFingerprint, seed: int
) -> Timing:
    """Time ``launch`` on the current device; raises whatever the launch raises, and RuntimeError where a graph of it
    does not write its outputs (a kernel that is not launched on the current stream)."""
    scalars = random_scalars(op, problem, seed)
    inputs = op.make_inputs(problem, device, seed)
    first = _argument_set(op, problem, inputs, scalars, device)
    if device.startswith("cuda"):
        return _time_cuda(launch, op, problem, first, device, fingerprint)
    return _time_cpu(launch, first, fingerprint)


def _argument_set(op: OpSpec, problem: Problem, inputs: Any, scalars: list[float], device: str) -> list[Any]:
    outputs = [
        torch.empty(argument.shape, dtype=getattr(torch, argument.dtype), device=device)
        for argument in op.arguments(problem)
        if argument.role == "output"
    ]
    return in_launch_order(op, problem, inputs, outputs, scalars)


def _rotating_sets(first: list[Any], needed_bytes: int, most_bytes: int, most_sets: int) -> list[list[Any]]:
    """``first`` and copies of it, together ``needed_bytes`` where the limits allow it."""
    set_bytes = sum(value.nbytes for value in first if isinstance(value, torch.Tensor))
    count = max(1, min(math.ceil(needed_bytes / set_bytes), most_bytes // set_bytes, most_sets))
    copies = [
        [value.clone() if isinstance(value, torch.Tensor) else value for value in first] for _ in range(count - 1)
    ]
    return [first, *copies]


def _windows(window_us: float, total_us: float, fewest: int) -> int:
    return max(fewest, min(WINDOWS, int(total_us / window_us)))


def _time_cpu(launch: Callable[..., Any], first: list[Any], fingerprint: DeviceFingerprint) -> Timing:
    def window(sets: list[list[Any]], launches: int) -> float:
        begin = time.perf_counter_ns()
        for index in range(launches):
            launch(*sets[index % len(sets)])
        return (time.perf_counter_ns() - begin) / 1000 / launches

    estimate_us = max(window([first], 1), 0.1)
    for _ in range(3 if estimate_us < CPU_TOTAL_US / 10 else 1):  # the first call warms up; one may be preempted
        estimate_us = min(estimate_us, max(window([first], 1), 0.1))
    launches = max(1, min(math.ceil(CPU_WINDOW_US / estimate_us), CPU_MAX_LAUNCHES))
    sets = _rotating_sets(first, COLD_L2_MULTIPLE * fingerprint.l2_bytes, CPU_BUFFER_BYTES, launches)
    count = _windows(estimate_us * launches, CPU_TOTAL_US, CPU_MIN_WINDOWS)
    return Timing([window(sets, launches) for _ in range(count)], launches, len(sets))


def _time_cuda(
    launch: Callable[..., Any],
    op: OpSpec,
    problem: Problem,
    first: list[Any],
    device: str,
    fingerprint: DeviceFingerprint,
) -> Timing:
    free_bytes, _ = torch.cuda.mem_get_info(torch.device(device))
    cold_bytes, most_bytes = COLD_L2_MULTIPLE * fingerprint.l2_bytes, int(MEMORY_SHARE * free_bytes)
    estimate_us = _estimate_cuda_us(launch, first)
    for _ in range(2):  # a short kernel launched alone takes the launch time: the first graph corrects that
        launches = max(1, min(math.ceil(GPU_WINDOW_US / estimate_us), GPU_MAX_LAUNCHES))
        sets = _rotating_sets(first, cold_bytes, most_bytes, launches)
        graph = _capture(launch, sets, launches)
        _check_graph_writes(graph, op, problem, sets)
        window_us = _elapsed_us(graph.replay)
        if window_us >= GPU_WINDOW_US or launches == GPU_MAX_LAUNCHES:
            break
        estimate_us = window_us / launches / 1.1
    for _ in range(math.ceil(GPU_BURN_IN_US / window_us)):
        graph.replay()
    events = []
    for _ in range(_windows(window_us, GPU_TOTAL_US, GPU_MIN_WINDOWS)):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return Timing([begin.elapsed_time(end) * 1000 / launches for begin, end in events], launches, len(sets))


def _estimate_cuda_us(launch: Callable[..., Any], arguments: list[Any], calls: int = 3) -> float:
    def several() -> None:
        for _ in range(calls):
            launch(*arguments)

    several()
    return _elapsed_us(several) / calls


def _elapsed_us(work: Callable[[], Any]) -> float:
    begin, end = _event(), _event()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return max(float(begin.elapsed_time(end)) * 1000, 0.5)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _capture(launch: Callable[..., Any], sets: list[list[Any]], launches: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(*sets[0])  # lets the library allocate its workspace for this stream before the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(launches):
            launch(*sets[index % len(sets)])
    return graph


def _check_graph_writes(
    graph: torch.cuda.CUDAGraph, op: OpSpec, problem: Problem, sets: list[list[Any]]
) -> None:
    places = [place for place, argument in enumerate(op.arguments(problem)) if argument.role == "output"]
    outputs = [arguments[place] for arguments in (sets[0], sets[-1]) for place in places]
    for output in outputs:
        output.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    if any(bool(output.isnan().any()) for output in outputs):
        raise RuntimeError("the captured graph does not write its outputs: launch on PyTorch's current stream")

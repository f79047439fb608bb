"""Times a launch: windows of many calls over rotating buffers, by CUDA graph on a GPU and by clock on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import OpSpec

from .clocks import Clocks, Reading
from .contention import Contention
from .rotation import Rotation, RotationFor, cold_sets

WINDOWS = 15
GPU_WINDOW_US = 1_000.0
GPU_BURN_IN_US = 100_000.0  # earlier an H200 is faster than in training, where its power cap holds
GPU_TOTAL_US = 1_000_000.0
GPU_MIN_WINDOWS = 5
GPU_MAX_LAUNCHES = 1024
GPU_GROUP = 5  # windows between two readings of the clock ...
GPU_RETAKES = 3  # ... and how many groups are taken again where it moved
CPU_WINDOW_US = 2_000.0
CPU_TOTAL_US = 500_000.0
CPU_MIN_WINDOWS = 3
CPU_ESTIMATE_US = 100_000.0
CPU_ESTIMATE_CALLS = 50
CPU_SHORTER = 8
CPU_EXTRA_S = 0.4  # at each length of window, for windows in place of those that other processes disturbed
CPU_MAX_LAUNCHES = 1024


@dataclass(frozen=True)
class Timing:
    """``samples_us``: microseconds a call, one for each window of ``launches`` calls over ``sets`` sets of buffers.

    ``contended``: other processes disturbed nearly every window, and these are the fastest. ``clock`` is the GPU's at
    the end, where it can be read; ``moved`` says that it never held still.
    """

    samples_us: list[float]
    launches: int
    sets: int
    contended: bool = False
    clock: Reading | None = None
    moved: bool = False

    def facts(self) -> dict[str, Any]:
        """What of it a measurement's resources keep."""
        return {
            "launches_per_window": self.launches,
            **({"contended": True} if self.contended else {}),
            **({"clock": self.clock.to_dict()} if self.clock else {}),
            **({"clock_moved": True} if self.moved else {}),
        }


Call = Callable[..., Any]


def time_launch(
    launch: Call, op: OpSpec, problem: Problem, device: str, fingerprint: DeviceFingerprint, seed: int
) -> Timing:
    """Time ``launch`` on the current device, cold; raises whatever the launch raises. On a GPU RuntimeError where a
    graph of it does not write its outputs (a kernel that is not launched on the current stream), and UnlikeResults
    where its launches do not write the same bits."""
    return _time(launch, *cold_sets(op, problem, device, fingerprint, seed), device)


def time_warm(call: Callable[[], Any], device: str) -> Timing:
    """Time a call that works on buffers of its own, the same at each call."""
    return _time(call, [], lambda launches: Rotation([[]]), device)


def _time(launch: Call, first: list[Any], rotation_for: RotationFor, device: str) -> Timing:
    return (_time_cuda if device.startswith("cuda") else _time_cpu)(launch, first, rotation_for, device)


def _windows(window_us: float, total_us: float, fewest: int) -> int:
    return max(fewest, min(WINDOWS, int(total_us / window_us)))


def cpu_window(launch: Call, arguments: Iterator[list[Any]], launches: int) -> float:
    """Microseconds a call over one window of ``launches`` calls."""
    begin = time.perf_counter_ns()
    for _ in range(launches):
        launch(*next(arguments))
    return (time.perf_counter_ns() - begin) / 1000 / launches


def _time_cpu(launch: Call, first: list[Any], rotation_for: RotationFor, device: str) -> Timing:
    window = partial(cpu_window, launch)
    window(iter([first]), 1)  # warms up
    calls_us = [window(iter([first]), 1)]
    while sum(calls_us) < CPU_ESTIMATE_US and len(calls_us) < CPU_ESTIMATE_CALLS:  # most may be disturbed, hardly all
        calls_us.append(window(iter([first]), 1))
    estimate_us = max(min(calls_us), 0.1)
    launches = max(1, min(math.ceil(CPU_WINDOW_US / estimate_us), CPU_MAX_LAUNCHES))
    rotation = rotation_for(launches)
    rotating = cycle(rotation.launched)
    count = _windows(estimate_us * launches, CPU_TOTAL_US, CPU_MIN_WINDOWS)
    limit_s = count * estimate_us * launches / 1e6 + CPU_EXTRA_S
    samples_us, contended = _clean_windows(lambda: window(rotating, launches), count, limit_s)
    shorter = launches // CPU_SHORTER
    if contended and shorter:  # short enough to fit between two disturbances
        launches = shorter
        samples_us, contended = _clean_windows(lambda: window(rotating, shorter), count, CPU_EXTRA_S)
    return Timing(samples_us, launches, len(rotation), contended)


def _clean_windows(window: Callable[[], float], count: int, limit_s: float) -> tuple[list[float], bool]:
    """(times of up to ``count`` windows that no other process disturbed, False), or the fastest windows' and True.

    In place of disturbed windows others are run while ``limit_s`` seconds last; CPU_MIN_WINDOWS clean ones are enough
    then. OpenMP threads wait for each other, so one that lost its processor stops them all.
    """
    contention = Contention()
    clean: list[float] = []
    disturbed: list[float] = []
    begin, last_s = time.perf_counter(), 0.0
    while len(clean) < count:
        window_begin = time.perf_counter()
        done = len(clean) + len(disturbed)
        if done >= CPU_MIN_WINDOWS and window_begin + last_s > begin + limit_s:
            break
        sample_us = window()
        (clean if contention.clean() else disturbed).append(sample_us)
        last_s = time.perf_counter() - window_begin
    if len(clean) >= CPU_MIN_WINDOWS:
        return clean, False
    return sorted(clean + disturbed)[:CPU_MIN_WINDOWS], True


def _time_cuda(launch: Call, first: list[Any], rotation_for: RotationFor, device: str) -> Timing:
    estimate_us = _estimate_cuda_us(launch, first)
    for _ in range(2):  # a short kernel launched alone takes the launch time: the first graph corrects that
        launches = max(1, min(math.ceil(GPU_WINDOW_US / estimate_us), GPU_MAX_LAUNCHES))
        rotation = rotation_for(launches)
        graph = capture(launch, rotation.launched, launches)
        written = rotation.written(graph, launches)
        window_us = _elapsed_us(graph.replay)
        if window_us >= GPU_WINDOW_US or launches == GPU_MAX_LAUNCHES:
            break
        estimate_us = window_us / launches / 1.1
    for _ in range(math.ceil(GPU_BURN_IN_US / window_us)):
        graph.replay()
    count = _windows(window_us, GPU_TOTAL_US, GPU_MIN_WINDOWS)
    windows_us, clock, moved = _steady_windows(graph, count, Clocks.of(device))
    rotation.require_alike(written, launches)
    return Timing([each / launches for each in windows_us], launches, len(rotation), clock=clock, moved=moved)


def _steady_windows(
    graph: torch.cuda.CUDAGraph, count: int, clocks: Clocks | None
) -> tuple[list[float], Reading | None, bool]:
    """(microseconds of ``count`` windows, the last reading, whether the clock moved in spite of GPU_RETAKES)."""
    kept: list[float] = []
    retakes, last, moved = 0, None, False
    while len(kept) < count:
        before = clocks.read() if clocks else None
        windows_us, after = graph_windows([graph] * min(GPU_GROUP, count - len(kept)), clocks)
        steady = before is None or after is None or before.is_steady_to(after)
        if not steady and retakes < GPU_RETAKES:
            retakes += 1
            continue
        kept += windows_us
        last, moved = after, moved or not steady
    return kept, last, moved


def graph_windows(
    graphs: list[torch.cuda.CUDAGraph], clocks: Clocks | None
) -> tuple[list[float], Reading | None]:
    """(microseconds of one replay of each, in order, without a gap; the clock as the last of them ran)."""
    graphs[0].replay()  # not timed: on an idle GPU the first would take the host's launch as well
    events = []
    for graph in graphs:
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        events.append((begin, end))
    reading = None
    if clocks:
        events[-1][0].synchronize()
        reading = clocks.read()
    torch.cuda.synchronize()
    return [float(begin.elapsed_time(end)) * 1000 for begin, end in events], reading


def _estimate_cuda_us(launch: Call, arguments: list[Any], calls: int = 3) -> float:
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


def capture(launch: Call, sets: list[list[Any]], launches: int) -> torch.cuda.CUDAGraph:
    """A graph of so many launches, over the sets in turn."""
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

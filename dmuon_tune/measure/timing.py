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
from .verify import allocate, as_launched, in_launch_order, random_scalars

WINDOWS = 15
COLD_L2_MULTIPLE = 3  # rotating over this many cache sizes leaves no operand of the next call in the cache
GPU_WINDOW_US = 1_000.0
GPU_BURN_IN_US = 20_000.0
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
CPU_BUFFER_BYTES = 256 * 2**20  # last-level caches of shared servers reach 500 MB: copying 3× that is not worth it
MEMORY_SHARE = 0.5  # of the GPU's free memory for rotating buffers


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
GraphCheck = Callable[["torch.cuda.CUDAGraph", int], None]  # of a graph of so many launches
# Calls in a window → the arguments of each in turn, and the check of a graph of them.
SetsFor = Callable[[int], tuple[list[list[Any]], GraphCheck]]


def time_launch(
    launch: Call, op: OpSpec, problem: Problem, device: str, fingerprint: DeviceFingerprint, seed: int
) -> Timing:
    """Time ``launch`` on the current device, cold; raises whatever the launch raises, and RuntimeError where a graph of
    it does not write its outputs (a kernel that is not launched on the current stream)."""
    first, sets_for = cold_sets(op, problem, device, fingerprint, seed)
    return _time(launch, first, sets_for, device)


def cold_sets(
    op: OpSpec, problem: Problem, device: str, fingerprint: DeviceFingerprint, seed: int
) -> tuple[list[Any], SetsFor]:
    """(Arguments of a launch, those of so many launches in turn): more of them than a cache holds."""
    scalars = random_scalars(op, problem, seed)
    inputs = op.make_inputs(problem, device, seed)
    first = in_launch_order(op, problem, inputs, allocate(op, problem, device), scalars)
    most_bytes = CPU_BUFFER_BYTES
    if device.startswith("cuda"):
        most_bytes = int(MEMORY_SHARE * torch.cuda.mem_get_info(torch.device(device))[0])

    def sets_for(launches: int) -> tuple[list[list[Any]], GraphCheck]:
        sets = _rotating_sets(first, COLD_L2_MULTIPLE * fingerprint.l2_bytes, most_bytes, launches)
        launched = [as_launched(op, problem, each) for each in sets]
        return launched, lambda graph, count: _check_graph_writes(graph, op, problem, sets[:count])

    return as_launched(op, problem, first), sets_for


def time_warm(call: Callable[[], Any], device: str) -> Timing:
    """Time a call that works on buffers of its own, the same at each call."""
    return _time(call, [], lambda launches: ([[]], lambda graph, count: None), device)


def _time(launch: Call, first: list[Any], sets_for: SetsFor, device: str) -> Timing:
    return (_time_cuda if device.startswith("cuda") else _time_cpu)(launch, first, sets_for, device)


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


def cpu_window(launch: Call, arguments: Iterator[list[Any]], launches: int) -> float:
    """Microseconds a call over one window of ``launches`` calls."""
    begin = time.perf_counter_ns()
    for _ in range(launches):
        launch(*next(arguments))
    return (time.perf_counter_ns() - begin) / 1000 / launches


def _time_cpu(launch: Call, first: list[Any], sets_for: SetsFor, device: str) -> Timing:
    window = partial(cpu_window, launch)
    window(iter([first]), 1)  # warms up
    calls_us = [window(iter([first]), 1)]
    while sum(calls_us) < CPU_ESTIMATE_US and len(calls_us) < CPU_ESTIMATE_CALLS:  # most may be disturbed, hardly all
        calls_us.append(window(iter([first]), 1))
    estimate_us = max(min(calls_us), 0.1)
    launches = max(1, min(math.ceil(CPU_WINDOW_US / estimate_us), CPU_MAX_LAUNCHES))
    sets, _alive = sets_for(launches)  # the check holds the tensors whose addresses are launched
    rotating = cycle(sets)
    count = _windows(estimate_us * launches, CPU_TOTAL_US, CPU_MIN_WINDOWS)
    limit_s = count * estimate_us * launches / 1e6 + CPU_EXTRA_S
    samples_us, contended = _clean_windows(lambda: window(rotating, launches), count, limit_s)
    shorter = launches // CPU_SHORTER
    if contended and shorter:  # short enough to fit between two disturbances
        launches = shorter
        samples_us, contended = _clean_windows(lambda: window(rotating, shorter), count, CPU_EXTRA_S)
    return Timing(samples_us, launches, len(sets), contended)


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


def _time_cuda(launch: Call, first: list[Any], sets_for: SetsFor, device: str) -> Timing:
    estimate_us = _estimate_cuda_us(launch, first)
    for _ in range(2):  # a short kernel launched alone takes the launch time: the first graph corrects that
        launches = max(1, min(math.ceil(GPU_WINDOW_US / estimate_us), GPU_MAX_LAUNCHES))
        sets, check = sets_for(launches)
        graph = capture(launch, sets, launches)
        check(graph, launches)
        window_us = _elapsed_us(graph.replay)
        if window_us >= GPU_WINDOW_US or launches == GPU_MAX_LAUNCHES:
            break
        estimate_us = window_us / launches / 1.1
    for _ in range(math.ceil(GPU_BURN_IN_US / window_us)):
        graph.replay()
    count = _windows(window_us, GPU_TOTAL_US, GPU_MIN_WINDOWS)
    windows_us, clock, moved = _steady_windows(graph, count, Clocks.of(device))
    return Timing([each / launches for each in windows_us], launches, len(sets), clock=clock, moved=moved)


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


def _check_graph_writes(
    graph: torch.cuda.CUDAGraph, op: OpSpec, problem: Problem, sets: list[list[Any]]
) -> None:
    """Looks at the first and the last of the sets that the graph works on. Outputs hold NaN before, and what is updated
    zeros, which no update of random values leaves."""
    before = {"output": math.nan, "inout": 0.0}
    written = [
        (arguments[place].fill_(before[argument.role]), argument.role)
        for arguments in (sets[0], sets[-1])
        for place, argument in enumerate(op.arguments(problem))
        if argument.role in before
    ]
    graph.replay()
    torch.cuda.synchronize()
    if any(bool(tensor.isnan().any() if role == "output" else (tensor == 0.0).all()) for tensor, role in written):
        raise RuntimeError("the captured graph does not write its outputs: launch on PyTorch's current stream")

"""The benchmarks' clocks: graph replays in windows, eager calls on the wall clock, a step's ranges, the ceiling."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dmuon_tune.runtime.phases import watched

WINDOW_US = 8e3
GRAPH_US, MAX_CALLS = 1e3, 64
TOTAL_US = 2.5e5  # a method, by which slow ones get fewer windows
MIN_WINDOWS, MAX_WINDOWS = 7, 15
EAGER_WINDOW_US, EAGER_TOTAL_US = 2e3, 1e5
HOST_CALLS = (3, 20)
BURN_IN_S = 0.5  # a cold GPU runs some 8 % faster than it can go on to
CEILING_ORDER = {"cuda": 8192, "cpu": 1024}

Work = Callable[[], object]


def spread(samples: list[float]) -> dict[str, float]:
    """Median, p20 and p80, of two samples at least; none lies beyond the samples."""
    p20, *_, p80 = statistics.quantiles(samples, n=5, method="inclusive")
    return {"median_us": statistics.median(samples), "p20_us": p20, "p80_us": p80}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Replay(NamedTuple):
    """``calls`` calls of some work at once."""

    run: Callable[[], object]
    calls: int = 1


def graph_of(work: Work) -> Replay:
    """A replay of so many captured calls that they take GRAPH_US on a GPU; the work itself on a CPU.

    A graph of one short call would measure the gap between two replays, some 10 µs, as well.
    """
    if not torch.cuda.is_available():
        return Replay(work)
    once = _captured(work, 1)
    calls = max(1, min(MAX_CALLS, round(GRAPH_US / _window_us(once, 3))))
    return once if calls == 1 else _captured(work, calls)


def _captured(work: Work, calls: int) -> Replay:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(calls):
            work()
    return Replay(graph.replay, calls)


def _window_us(replay: Replay, repeats: int) -> float:
    """Microseconds a call."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(repeats):
            replay.run()
        return (time.perf_counter() - begin) / (repeats * replay.calls) * 1e6
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        replay.run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / (repeats * replay.calls) * 1e3


def interleaved(replays: Mapping[str, Replay]) -> dict[str, dict[str, float]]:
    """Name → spread in microseconds; windows of all are run in random order, so that drift hits them alike."""
    repeats = {
        name: max(1, int(WINDOW_US / max(_window_us(replay, 2) * replay.calls, 1.0)))
        for name, replay in replays.items()
    }
    counts = {
        name: max(MIN_WINDOWS, min(MAX_WINDOWS, int(TOTAL_US / (us * repeats[name] * replays[name].calls))))
        for name, us in ((name, _window_us(replay, repeats[name])) for name, replay in replays.items())
    }
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for turn in range(MAX_WINDOWS):
        for name in random.sample(list(replays), len(replays)):
            if turn < counts[name]:
                samples[name].append(_window_us(replays[name], repeats[name]))
    return {name: spread(found) for name, found in samples.items()}


def row_us(work: Work, calls: int) -> float:
    """Microseconds a call in a row of calls, waited for at its end."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


def host_us(work: Work) -> float:
    """Microseconds until a call returns, the device idle before it."""
    synchronize()
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e6


def eager(work: Work) -> dict[str, float]:
    """``wall_*``: the spread of :func:`row_us`; ``host_us``: the median of :func:`host_us`."""
    row_us(work, 3)
    estimate_us = row_us(work, 2)
    calls = max(1, int(EAGER_WINDOW_US / estimate_us))
    windows = max(3, min(MAX_WINDOWS, int(EAGER_TOTAL_US / (calls * estimate_us))))
    walls = spread([row_us(work, calls) for _ in range(windows)])
    fewest, most = HOST_CALLS
    hosts = [host_us(work) for _ in range(max(fewest, min(most, int(EAGER_TOTAL_US / estimate_us))))]
    synchronize()
    return {f"wall_{name}": value for name, value in walls.items()} | {"host_us": statistics.median(hosts)}


class Clock:
    """Takes the place of the profiler's ranges: the device's time between the two ends of each."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._spans.append((name, begin, self._now()))

    def totals_us(self) -> dict[str, float]:
        synchronize()
        found: Counter[str] = Counter()
        for name, begin, end in self._spans:
            found[name] += begin.elapsed_time(end) * 1e3 if self._cuda else (end - begin) * 1e6
        return dict(found)


def ranges_us(work: Work, device: torch.device, calls: int) -> dict[str, float]:
    """Range of the runtime that ``work`` goes through (without ``Muon: ``) → microseconds a call, the device's own."""
    with watched(Clock(device).range):
        work()  # phases that are watched are launched apart, by graphs that the first such call makes
    clock = Clock(device)
    with watched(clock.range):
        for _ in range(calls):
            work()
    return {name: us / calls for name, us in clock.totals_us().items()}


def ceiling_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of the vendor library's square product on random data, clocks settled."""
    order = CEILING_ORDER[device.type]
    rng = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn(order, order, device=device, generator=rng).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    product = graph_of(lambda: torch.mm(a, b, out=out))
    begin = time.perf_counter()
    while time.perf_counter() < begin + BURN_IN_S:
        product.run()
        synchronize()
    found = interleaved({"product": product})
    return 2 * order**3 / found["product"]["median_us"] * 1e6

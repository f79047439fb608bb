"""Times one problem's finalists against each other, round after round in random order, and drops the slower ones."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

import torch

from dmuon_tune.backends import CompiledKernel
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import ops
from dmuon_tune.measurement import Measurement

from .build import compile_once
from .clocks import Clocks, Reading
from .contention import Contention
from .job import Outcome, RaceJob, RaceResult, last_traceback
from .rotation import Rotation, UnlikeResults, cold_sets
from .timing import capture, cpu_window, graph_windows
from .verify import verify

AT_LEAST = 2  # entrants that are compiled whatever the time: one alone is no race
ROUNDS = 120  # on a GPU at its power limit 30 left a difference of 3.3 % untold in a third of the draws
FEWEST_ROUNDS = 8  # the least that can tell two entrants apart at ALPHA
ALPHA = 0.005  # of each bound of the interval of two entrants' ratio: a race asks often
SAME = 1.01  # a smaller difference is none: two runs of one kernel on one day differ as much
BURN_IN_US = 200_000.0  # which of two is faster depends on whether the power cap holds: on an H200 after 0.1 s
LIMIT_S = 2.0  # of all rounds, where FEWEST_ROUNDS take less
REPLAYS = 4  # of an entrant's window before it is timed, after each of which what it wrote is compared
REPORT_S = 0.5  # how often the parent hears that it goes on

Round = dict[int, float]  # entrant → microseconds a call in one window
Name = Callable[[int | None], None]  # says whose turn it is, or nobody's


@dataclass
class _Lane:
    """An entrant that compiled and is right: its launch, and on a GPU a graph of its window."""

    launch: Callable[..., Any]
    launches: int
    resources: dict[str, Any]
    max_rel_err: float
    arguments: Iterator[list[Any]]
    graph: torch.cuda.CUDAGraph | None = None


def race(
    job: RaceJob, device: DeviceFingerprint, report: Callable[[str, Any], None], lock: Callable[[], None]
) -> Outcome:
    """Compile and verify every entrant, then time them until the fastest is known or the rounds run out.

    A launch that fails on a GPU may leave a context in which every later one fails: it ends the race, as a measurement
    whose resources name the ``entrant``, unless it was one of many that ran without a look between them. ``lock`` is
    called before the first launch.
    """
    turn: int | None = None

    def name(place: int | None) -> None:
        nonlocal turn
        turn = place
        report("entrant", place)

    try:
        return _race(job, device, report, name, lock)
    except (Exception, SystemExit):
        return Measurement("launch_error", resources={} if turn is None else {"entrant": turn}, log=last_traceback())


def _race(
    job: RaceJob, device: DeviceFingerprint, report: Callable[[str, Any], None], name: Name, lock: Callable[[], None]
) -> Outcome:
    outcomes: dict[int, Measurement] = {}
    lanes: dict[int, _Lane] = {}
    compiled = {}
    end = time.monotonic() + job.prepare_s
    for place, entrant in enumerate(job.entrants):
        if place >= AT_LEAST and time.monotonic() > end:
            break
        name(place)
        report("phase", "compiling")
        try:
            compiled[place] = compile_once(entrant.kernel_name, job.problem, entrant.config, device)
        except (Exception, SystemExit):
            outcomes[place] = Measurement("compile_error", log=last_traceback())
    name(None)
    lock()
    first, rotation_for = cold_sets(ops()[job.problem.op], job.problem, job.device, device, job.seed)
    rotation = rotation_for(max(entrant.launches for entrant in job.entrants))
    for place, kernel in compiled.items():
        name(place)
        report("phase", "running")
        try:
            found = _prepared(job, place, kernel, first, rotation)
        except (Exception, SystemExit):
            if device.kind == "cuda":
                raise
            found = Measurement("launch_error", resources=kernel.resources, log=last_traceback())
        if isinstance(found, Measurement):
            outcomes[place] = found
        else:
            lanes[place] = found
    name(None)
    outcomes |= _timed(lanes, job, name, lambda: report("phase", "running"))
    return RaceResult(tuple(outcomes.get(place) for place in range(len(job.entrants))))


def _prepared(
    job: RaceJob, place: int, kernel: CompiledKernel, first: list[Any], rotation: Rotation
) -> _Lane | Measurement:
    """Verified and warmed up, on a GPU captured; or how that failed."""
    verdict = verify(kernel.launch, ops()[job.problem.op], job.problem, job.device, job.seed)
    resources = {**kernel.resources, "rotating_sets": len(rotation)}
    if verdict.failure:
        return Measurement("wrong_result", max_rel_err=verdict.max_rel_err, resources=resources, log=verdict.failure)
    kernel.launch(*first)
    launches = max(1, job.entrants[place].launches)
    lane = _Lane(kernel.launch, launches, resources, verdict.max_rel_err or 0.0, cycle(rotation.launched))
    if job.device != "cpu":
        lane.graph = capture(kernel.launch, rotation.launched, launches)
        try:
            _require_repeatable(lane.graph, rotation, launches)
        except UnlikeResults as error:
            return Measurement("wrong_result", max_rel_err=verdict.max_rel_err, resources=resources, log=str(error))
    return lane


def _require_repeatable(graph: torch.cuda.CUDAGraph, rotation: Rotation, launches: int) -> None:
    written = rotation.written(graph, launches)
    for _ in range(REPLAYS):
        graph.replay()
        rotation.require_alike(written, launches)


def _timed(lanes: dict[int, _Lane], job: RaceJob, name: Name, alive: Callable[[], None]) -> dict[int, Measurement]:
    if not lanes:
        return {}
    on_cpu = job.device == "cpu"
    clocks = Clocks.of(job.device)
    run = _cpu_rounds(lanes, name) if on_cpu else _cuda_rounds(lanes, clocks, name if job.stepwise else None)
    rounds, disturbed, tied = _rounds(set(lanes), run, random.Random(job.seed), alive)
    clock = clocks.read() if clocks else None
    shared: dict[str, Any] = {("contended" if on_cpu else "clock_moved"): True} if disturbed else {}
    shared |= {"clock": clock.to_dict()} if clock else {}
    found, times = {}, paired(rounds)
    for place, lane in lanes.items():
        samples = times[place]
        record = {"windows": len(samples), "tied": place in tied}
        resources = {**lane.resources, "launches_per_window": lane.launches, "race": record, **shared}
        found[place] = Measurement.from_samples(samples, lane.max_rel_err, resources)
    return found


def paired(rounds: list[Round]) -> dict[int, list[float]]:
    """Each entrant's times, microseconds: its own, or, of one that was dropped, no less than its ratios to the fastest
    make of the fastest's median.

    What was dropped early has windows of those moments alone: on a card that slows down meanwhile its own median would
    be below that of the one it lost to.
    """
    lasting = set.intersection(*map(set, rounds))
    medians = {place: median(each[place] for each in rounds) for place in lasting}
    fastest = min(lasting, key=lambda place: (medians[place], place))
    return {
        place: [each[place] if place in lasting else max(each[place], each[place] / each[fastest] * medians[fastest])
                for each in rounds if place in each]
        for place in set().union(*rounds)
    }


RunRound = Callable[[list[int]], tuple[Round, bool]]  # entrants in order → their times, whether nothing disturbed them


def _cpu_rounds(lanes: dict[int, _Lane], name: Name) -> RunRound:
    contention = Contention()

    def run(order: list[int]) -> tuple[Round, bool]:
        contention.clean()
        found = {}
        for place in order:
            name(place)
            lane = lanes[place]
            found[place] = cpu_window(lane.launch, lane.arguments, lane.launches)
        name(None)
        return found, contention.clean()

    return run


def _cuda_rounds(lanes: dict[int, _Lane], clocks: Clocks | None, name: Name | None) -> RunRound:
    """With ``name`` each entrant's work is over before the next one's turn, so that it is known whose work fails."""
    graphs = {place: lane.graph for place, lane in lanes.items() if lane.graph is not None}
    last: Reading | None = None

    def begin(place: int) -> None:
        if name is not None:
            torch.cuda.synchronize()
            name(place)

    def windows(order: list[int]) -> tuple[list[float], Reading | None]:
        if name is None:
            return graph_windows([graphs[place] for place in order], clocks)
        times_us: list[float] = []
        for place in order:
            begin(place)
            each_us, now = graph_windows([graphs[place]], clocks)
            times_us += each_us
        name(None)
        return times_us, now

    def run(order: list[int]) -> tuple[Round, bool]:
        nonlocal last
        times_us, now = windows(order)
        steady = last is None or now is None or last.is_steady_to(now)
        last = now
        return {place: time_us / lanes[place].launches for place, time_us in zip(order, times_us, strict=True)}, steady

    windows_us, _ = windows(list(graphs))
    for _ in range(math.ceil(BURN_IN_US / sum(windows_us))):
        for place, graph in graphs.items():
            begin(place)
            graph.replay()
    return run


def _rounds(
    entrants: set[int], run: RunRound, rng: random.Random, alive: Callable[[], None]
) -> tuple[list[Round], bool, set[int]]:
    """(The rounds that count, whether nearly all were disturbed, the entrants that tie with the fastest).

    A disturbed round is run again, up to ROUNDS in all; where too few were clean, all of them count.
    """
    clean: list[Round] = []
    every: list[Round] = []
    racing, tied = set(entrants), set(entrants)
    begin = reported = time.monotonic()
    while len(clean) < ROUNDS and len(every) < 2 * ROUNDS and (len(racing) > 1 or len(every) < FEWEST_ROUNDS):
        now = time.monotonic()
        if len(every) >= FEWEST_ROUNDS and now > begin + LIMIT_S:
            break
        if now > reported + REPORT_S:
            alive()
            reported = now
        found, is_clean = run(rng.sample(sorted(racing), len(racing)))
        every.append(found)
        if is_clean:
            clean.append(found)
            racing, tied = standing(clean, racing)
    if len(clean) < FEWEST_ROUNDS:
        _, tied = standing(every, racing)
    counted = clean if len(clean) >= FEWEST_ROUNDS else every
    return counted, counted is every and len(clean) < len(every), tied


def standing(rounds: list[Round], racing: set[int]) -> tuple[set[int], set[int]]:
    """(Entrants worth another round, entrants that tie with the fastest) of those that were in every round.

    The fastest has the least median. Another one is slower where the interval of the median of both one's windows'
    ratios, round by round, lies above SAME; it need not race on where the interval lies below.
    """
    medians = {place: median(each[place] for each in rounds) for place in racing}
    fastest = min(racing, key=lambda place: (medians[place], place))
    open_, tied = set(), {fastest}
    for place in racing - {fastest}:
        low, high = interval([each[place] / each[fastest] for each in rounds])
        if low <= SAME:
            tied.add(place)
            if high >= SAME:
                open_.add(place)
    return (open_ | tied if open_ else {fastest}), tied


def interval(ratios: list[float]) -> tuple[float, float]:
    """Bounds of the median that each hold but for a chance of ALPHA, by the sign test, whatever the distribution."""
    ordered, below = sorted(ratios), 0.0
    rank = -1  # of the bound among the ratios, counted from either end
    for count in range(len(ordered) // 2):
        below += math.comb(len(ordered), count) / 2 ** len(ordered)
        if below > ALPHA:
            break
        rank = count
    return (ordered[rank], ordered[-1 - rank]) if rank >= 0 else (0.0, math.inf)

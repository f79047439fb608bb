"""What a run will search, how much of it the cache holds already, and about how long the rest takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Layers, Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import ops
from dmuon_tune.problem import Problem, distance
from dmuon_tune.recipe import Group, default_dtype
from dmuon_tune.spec import KernelSpec

from .ends import EndSearch
from .kernel_search import kernel_searches, usable_kernels
from .neighbours import Neighbours
from .options import TuneOptions
from .problem_search import ProblemSearch, problem_search
from .shares import CHAINS_SHARE, RACE_S
from .workload import ends, workload

GUESSED_S = {"cpu": 1.5, "cuda": 1.0}  # from one result to the next, where the cache holds too few to tell
FEWEST_GAPS = 10  # that tell
PAUSE_S = 60.0  # a longer gap is one between runs


@dataclass(frozen=True)
class ProblemPlan:
    """One problem: the legal configurations of each kernel, how many outcomes the cache holds, how many more are
    ``planned`` at most, and the best time so far. ``share``: of the floating-point operations of all problems that
    chains consist of."""

    problem: Problem
    share: float
    legal: dict[str, int]
    known: int
    planned: int
    best_us: float | None


@dataclass(frozen=True)
class TunePlan:
    """What :func:`dmuon_tune.search.tune` would do with the same arguments, the most expensive problem first.

    ``estimate_s``: about how long it takes without its budget; ``pace_s`` of it from one result to the next, which is
    measured where the cache says how long it took (``is_measured``).
    """

    problems: list[ProblemPlan]
    estimate_s: float
    pace_s: float
    is_measured: bool


def plan(groups: Sequence[Group], store: Store, options: TuneOptions) -> TunePlan:
    """Plan a run without starting it; raises what the run would raise at its start."""
    devices = options.device_names()
    device = fingerprint(devices[0])
    dtype = options.dtype or default_dtype(device.kind)
    specs, _ = usable_kernels(device, options.backends)
    searches = searches_of(groups, dtype, specs, device, store, options)
    weights = workload(groups, dtype, specs, device)
    total = sum(weights.values())
    problems = [
        ProblemPlan(
            search.problem, weights.get(search.problem, 0) / total,
            {each.key.kernel: each.legal_count for each in search.kernels}, search.known, search.planned,
            search.best_us,
        )
        for search in searches
    ]
    measured_s = _measured_pace_s(store, device)
    pace_s = GUESSED_S[device.kind] if measured_s is None else measured_s
    planned = sum(problem.planned for problem in problems)
    racing = sum(problem.planned > 0 for problem in problems)
    estimate_s = (planned * pace_s + racing * RACE_S) / (1 - CHAINS_SHARE) / len(devices)
    return TunePlan(problems, estimate_s, pace_s, measured_s is not None)


def _measured_pace_s(store: Store, device: DeviceFingerprint) -> float | None:
    """The median time from one result on this device model to the next; None where there are too few."""
    ends_s: dict[Any, list[float]] = defaultdict(list)  # by which of several such devices a run measured on
    for trial in store.all_trials():
        if trial.key.device == device:
            ends_s[trial.provenance.get("on")].append(datetime.fromisoformat(trial.created_at).timestamp())
    pairs = (pair for each in ends_s.values() for pair in pairwise(sorted(each)))
    gaps_s = [after - before for before, after in pairs if after - before < PAUSE_S]
    return median(gaps_s) if len(gaps_s) >= FEWEST_GAPS else None


def searches_of(
    groups: Sequence[Group], dtype: str, specs: Sequence[KernelSpec], device: DeviceFingerprint, store: Store,
    options: TuneOptions, layers: Layers | None = None,
) -> list[ProblemSearch]:
    """The searches of the chains' products, the most expensive first, then of their ends."""
    how = options.seed, options.sampler, Neighbours(store, device, layers)
    products = {
        problem: problem_search(
            problem, specs, device, store, options.trials, *how, options.patience,
            weight // ops()[problem.op].flops(problem),
        )
        for problem, weight in workload(groups, dtype, specs, device).items()
    }
    at_ends = [
        EndSearch(
            end, kernel_searches(end, specs, device, store, *how), options.trials,
            products[like] if like else None,
        )
        for end, like in ends(groups, dtype, specs, device, options.weights_dtype).items()
    ]
    found = [*products.values(), *at_ends]
    for search in found:
        of_op = (each for each in found if each.problem.op == search.problem.op and each is not search)
        search.siblings = sorted(of_op, key=lambda each: distance(each.problem, search.problem))
    return found

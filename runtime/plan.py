"""The plan: every product of a model's orthogonalization resolved once, from the cache, to a callable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from logging import getLogger
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import dmuon_tune
from dmuon_tune import checks
from dmuon_tune.backends import CompiledKernel, probe
from dmuon_tune.cache import Layers
from dmuon_tune.chains import Launches, last_product
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import DmuonTuneError, MissingEntryError, UsageError
from dmuon_tune.measure import untuned
from dmuon_tune.measure.build import compiled_kernel
from dmuon_tune.problem import DTYPES, Problem
from dmuon_tune.recipe import DEFAULT_RESTARTS, DEFAULT_STEPS, Group, Recipe, chain, default_dtype
from dmuon_tune.words import counted

from .resolve import Binding, Resolver

ON_MISS_VARIABLE = "DMUON_TUNE_ON_MISS"
POLICIES = ("heuristic", "nearest", "tune", "error")

_NOTHING: AbstractContextManager[Any] = nullcontext()

logger = getLogger("dmuon_tune.runtime")


def check_policy(policy: str) -> None:
    """UsageError, with both names that it may be given under, where there is no such policy."""
    if policy not in POLICIES:
        raise UsageError(f"on_miss or {ON_MISS_VARIABLE}: unknown policy {policy!r}; choose {', '.join(POLICIES)}")


@dataclass(frozen=True)
class GroupPlan:
    """How one group is orthogonalized: its recipe, the layer that named it (empty: the default), its products."""

    recipe: Recipe
    layer: str
    bindings: Mapping[Problem, Binding]

    @property
    def cost_us(self) -> float | None:
        """The chain's time, in microseconds: its own where it was timed, else the sum of its products' tuned times;
        None where a product was not timed."""
        if self.recipe.timed:
            return self.recipe.cost_us
        times = [(self.bindings[problem].median_us, count) for problem, count in self.recipe.products().items()]
        if any(median is None for median, _ in times):
            return None
        return sum((median or 0.0) * count for median, count in times)

    @cached_property
    def launches(self) -> Mapping[int, Launches]:
        """The chain's launches by (op, epilogue), for each size of its pieces."""
        return {
            size: {(problem.op, problem.epilogue): bound.launch for problem, bound in self.piece(size).items()}
            for size in set(self.recipe.pieces)
        }

    def piece(self, size: int) -> dict[Problem, Binding]:
        """The products of a piece of ``size`` matrices."""
        recipe, group = self.recipe, self.recipe.group
        problems = chain(Group(size, group.rows, group.cols), recipe.form, recipe.dtype, recipe.steps, recipe.restarts)
        return {problem: self.bindings[problem] for problem in problems}

    def bound(self, size: int, op: str, epilogue: str) -> Binding:
        """This product of a piece of ``size`` matrices."""
        return next(
            bound for problem, bound in self.piece(size).items() if (problem.op, problem.epilogue) == (op, epilogue)
        )

    @cached_property
    def endings(self) -> Mapping[int, Binding]:
        """The last product of a piece, for each size of the pieces."""
        sizes = set(self.recipe.pieces)
        if self.recipe.form == "small":
            return {size: next(iter(self.piece(size).values())) for size in sizes}
        return {size: self.bound(size, *last_product(self.recipe.form)) for size in sizes}


@dataclass(frozen=True)
class Plan:
    """What every group of a model runs on one device; it never changes after :func:`plan` made it.

    ``missing`` are the problems without a tuned entry and ``command`` is what fills them (empty where none is);
    ``failures`` says of each kernel that did not compile or load why, and what runs in its place.
    """

    device: str
    fingerprint: DeviceFingerprint
    groups: Mapping[Group, GroupPlan]
    missing: tuple[Problem, ...] = ()
    command: str = ""
    failures: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One row a product of a group: group, form, problem, count, origin, layer, kernel, config, median_us."""
        rows = []
        for group, planned in self.groups.items():
            recipe = planned.recipe
            for problem, count in recipe.products().items():
                bound = planned.bindings[problem]
                rows.append({
                    "group": group.label(),
                    "form": recipe.form,
                    "problem": problem.label(),
                    "count": count,
                    "origin": bound.origin,
                    "layer": bound.layer,
                    "kernel": bound.kernel,
                    "config": dict(bound.config),
                    "median_us": bound.median_us,
                })
        return rows


def plan(
    groups: Iterable[Group],
    device: str = "auto",
    dtype: str | None = None,
    layers: Layers | None = None,
    on_miss: str | None = None,
    steps: int = DEFAULT_STEPS,
    restarts: Sequence[int] | None = None,
    build: Callable[..., CompiledKernel] = compiled_kernel,
) -> Plan:
    """Resolve every product of the groups' chains to a compiled callable; nothing else of the runtime reads files.

    ``dtype`` is the chain's (default: the device's, see ``recipe.default_dtype``), ``layers`` the caches to look in
    (default: ``Layers.open()``), ``on_miss`` what happens without an entry (default: ``DMUON_TUNE_ON_MISS``, else
    ``heuristic``), ``build`` makes the callables (another one resolves without compiling). Raises MissingEntryError
    with policy ``error``, UsageError for an unknown policy, dtype or device.
    """
    wanted = tuple(dict.fromkeys(checks.each_of("groups", groups, Group)))
    checks.integer("steps", steps)
    default = tuple(step for step in DEFAULT_RESTARTS if step < steps)
    wanted_restarts = default if restarts is None else checks.restarts(restarts, steps)
    checks.instance("layers", layers, Layers)
    policy = (os.environ.get(ON_MISS_VARIABLE) or "heuristic") if on_miss in (None, "") else on_miss
    check_policy(policy)
    resolved_device = probe.resolve(device)
    fingerprint = probe.fingerprint(resolved_device)
    chain_dtype = dtype or default_dtype(fingerprint.kind)
    if chain_dtype not in DTYPES:
        raise UsageError(f"unsupported dtype {chain_dtype!r}; choose one of {', '.join(DTYPES)}")
    opened = Layers.open() if layers is None else layers
    try:
        with device_context(torch.device(resolved_device)):
            resolver = Resolver(fingerprint, opened, use_nearest=policy == "nearest", build=build)
            planned = _plan_groups(wanted, chain_dtype, resolver, steps, wanted_restarts)
            if resolver.missing and policy == "tune":
                _tune(_command(wanted, planned, resolver, chain_dtype))
                resolver = Resolver(fingerprint, opened, use_nearest=False, build=build)
                planned = _plan_groups(wanted, chain_dtype, resolver, steps, wanted_restarts)
            resolver.release()
    finally:
        if layers is None:
            opened.close()
    command = " ".join(_command(wanted, planned, resolver, chain_dtype)) if resolver.missing else ""
    _report(resolver, policy, command)
    return Plan(
        resolved_device, fingerprint, MappingProxyType(planned), tuple(resolver.missing), command,
        tuple(resolver.failures),
    )


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, as the DSLs compile for it and launch on its current stream."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NOTHING
    return torch.cuda.device(device)


def _plan_groups(
    groups: Sequence[Group], dtype: str, resolver: Resolver, steps: int, restarts: Sequence[int]
) -> dict[Group, GroupPlan]:
    return {
        group: _bind(resolver, *_recipe(resolver, group, dtype, steps, tuple(restarts))) for group in groups
    }


def _recipe(
    resolver: Resolver, group: Group, dtype: str, steps: int, restarts: tuple[int, ...]
) -> tuple[str, Recipe]:
    """(Layer label, recipe) of the caches for this group, or the default one."""
    layer, kept = resolver.layers.recipe(resolver.device, group, dtype) or ("", None)
    if kept is not None and (kept.steps, kept.restarts) == (steps, restarts):
        return layer, kept
    if kept is None or kept.form in ("small", "span"):  # whose kernels are of other steps
        bare = Recipe(group, "gram", dtype, steps, restarts)
        return "", replace(bare, form=untuned.default_form(bare, resolver.flops, resolver.untuned_fused))
    return layer, replace(kept, steps=steps, restarts=restarts, cost_us=None, p20_us=None, p80_us=None)


def _bind(resolver: Resolver, layer: str, recipe: Recipe) -> GroupPlan:
    picks = {pick.problem: pick for pick in recipe.picks}
    bindings = {problem: resolver.bind(problem, picks.get(problem), layer) for problem in recipe.products()}
    fused = [bound for problem, bound in bindings.items() if problem.op in ("polar_small", "gram_span")]
    given = recipe.form == "span" and layer and recipe.cost_us is None  # by who wrote the cache, not by a measurement
    if not given and any(bound.origin == "library" for bound in fused):
        # Its kernel is gone, and the library has none in one launch.
        bare = Recipe(recipe.group, "gram", recipe.dtype, recipe.steps, recipe.restarts)
        if recipe.form != "span":
            bare = replace(bare, form=untuned.cheaper_form(bare, resolver.flops, resolver.untuned_fused))
        return _bind(resolver, "", bare)
    return GroupPlan(recipe, layer, MappingProxyType(bindings))


def _command(
    groups: Sequence[Group], planned: Mapping[Group, GroupPlan], resolver: Resolver, dtype: str
) -> list[str]:
    missing = set(resolver.missing)
    shapes = [
        group.label() for group in groups if any(bound.problem in missing for bound in planned[group].bindings.values())
    ]
    command = ["dmuon-tune", "tune", "--shapes", ",".join(shapes), "--dtype", dtype]
    kind = resolver.device.kind
    return command if probe.resolve("auto") == kind else [*command, "--device", kind]


def _tune(command: list[str]) -> None:
    """Run the tuner in a process of its own, its progress on this process's stderr."""
    roots = [str(Path(path).resolve().parent) for path in dmuon_tune.__path__[:1]]
    search_path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "dmuon_tune", *command[1:]],
        env={**os.environ, "PYTHONPATH": search_path},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise DmuonTuneError(f"tuning on a miss failed with exit code {done.returncode}; run: {' '.join(command)}")


def report_failures(resolver: Resolver) -> None:
    """Warn of each kernel that did not compile, once in this process."""
    for failure in resolver.failures:
        _warn_once(failure)


def _report(resolver: Resolver, policy: str, command: str) -> None:
    report_failures(resolver)
    if not resolver.missing:
        return
    count = f"{len(resolver.missing)} of {counted(len(resolver.bound), 'product')}"
    what = f"no tuned kernel on {resolver.device.name} for {count}"
    if policy == "error":
        raise MissingEntryError(f"{what} ({resolver.missing[0].label()}, ...); run: {command}")
    used = ", ".join(sorted({resolver.bound[problem].origin for problem in resolver.missing}))
    _warn_once(f"{what}; used instead: {used}; to fill the gap run: {command}")


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)

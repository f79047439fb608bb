"""What to do next: what is missing, failed, stale, disturbed or unfinished, and the command that mends it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe, chain, default_dtype
from dmuon_tune.words import counted

from .data import DeviceReport, Product

NAMED = 3  # examples of what an advice is about


@dataclass(frozen=True)
class Advice:
    """What was found, what it means, and the command to run, empty where there is none."""

    finding: str
    meaning: str
    command: str = ""


def advice(report: DeviceReport, cache_path: str = "") -> list[Advice]:
    """The most important first; ``cache_path`` is the cache that was named on the command line, empty for layers."""
    where = ["--device", report.device.kind, *(["--cache", cache_path] if cache_path else [])]
    found = _missing, _failed, _stale, _stale_recipes, _disturbed, _unplanned, _untimed, _unpriced, _unmeasured
    return [each for kind in found for each in kind(report, where)]


def groups_of(products: Iterable[Problem]) -> list[Group]:
    """The groups that these problems are of, as far as they say it: a Gram matrix or a product with X does."""
    found: dict[Group, None] = {}
    for problem in products:
        n = problem.k if problem.op == "gram" else problem.n
        if problem.op in ("gram", "apply", "polar_small") and n >= problem.m:
            rows, cols = (problem.m, n) if problem.layout == "row" else (n, problem.m)
            found[Group(problem.batch, rows, cols)] = None
    return list(found)


def _tune(groups: Iterable[Group], dtype: str, where: Sequence[str]) -> str:
    shapes = ",".join(group.label() for group in dict.fromkeys(groups))
    return shlex.join(["dmuon-tune", "tune", "--shapes", shapes, "--dtype", dtype, *where]) if shapes else ""


def _tune_problems(problems: Sequence[Problem], where: Sequence[str]) -> str:
    """One command for the groups of the dtype that most of these are of."""
    dtypes = [problem.dtype for problem in problems]
    dtype = max(dtypes, key=dtypes.count)
    return _tune(groups_of(problem for problem in problems if problem.dtype == dtype), dtype, where)


def _named(labels: Iterable[str]) -> str:
    every = list(dict.fromkeys(labels))
    return ", ".join(every[:NAMED]) + (f" and {len(every) - NAMED} more" if len(every) > NAMED else "")


def _groups(recipes: Iterable[Recipe]) -> str:
    return _named(recipe.group.label() for recipe in recipes)


def _missing(report: DeviceReport, where: Sequence[str]) -> Iterator[Advice]:
    if report.is_empty and not report.wanted:
        yield Advice(
            "Nothing is tuned for this device.", "Training runs untuned choices.",
            shlex.join(["dmuon-tune", "tune", "--preset", "qwen2.5-7b", *where]),
        )
    have = {product.problem for product in report.products if product.winner is not None}
    dtypes = [kept.recipe.dtype for kept in report.recipes] or [product.problem.dtype for product in report.products]
    dtype = max(dtypes, key=dtypes.count, default=default_dtype(report.device.kind))
    known = groups_of(product.problem for product in report.products if product.problem.dtype == dtype)
    gaps: dict[Group, list[Problem]] = {}
    for group in dict.fromkeys([*report.wanted, *known]):
        lacks = [] if _covered(report, group) else [each for each in chain(group, "gram", dtype) if each not in have]
        if lacks:
            gaps[group] = lacks
    if gaps:
        count = len({problem for lacks in gaps.values() for problem in lacks})
        yield Advice(
            f"{counted(count, 'problem')} of {counted(len(gaps), 'group')} not tuned: "
            f"{_named(problem.label() for lacks in gaps.values() for problem in lacks)}.",
            "Either they were never asked for or a budget ended before them. Training runs untuned choices there.",
            _tune(gaps, dtype, where),
        )


def _covered(report: DeviceReport, group: Group) -> bool:
    """Whether a recipe runs this group by one launch or in pieces, which need other problems than the Gram form."""
    return any(kept.recipe.group == group and kept.recipe.picks for kept in report.recipes)


def _failed(report: DeviceReport, where: Sequence[str]) -> Iterator[Advice]:
    failed = [product for product in report.products if product.winner is None]
    if failed:
        yield Advice(
            f"{counted(len(failed), 'problem')} where every configuration failed: {_labels(failed)}.",
            "The reasons stand under Failures. A failure is kept and not tried again under the same code and "
            "toolchain; mend or upgrade what failed, then tune again.",
            _tune_problems([product.problem for product in failed], where),
        )


def _labels(products: Sequence[Product]) -> str:
    return _named(product.problem.label() for product in products)


def _stale(report: DeviceReport, where: Sequence[str]) -> Iterator[Advice]:
    stale = [product for product in report.products if product.winner is not None and product.winner.stale]
    if stale:
        reasons = sorted({(product.winner.stale or "").partition(":")[0] for product in stale if product.winner})
        yield Advice(
            f"{counted(len(stale), 'winner is', 'winners are')} stale ({', '.join(reasons)}): {_labels(stale)}.",
            "They were measured with other code or toolchains than those installed where this report was made, and "
            "training there does not use them. Tuning again replaces them; the old results stay in the cache.",
            _tune_problems([product.problem for product in stale], where),
        )


def _stale_recipes(report: DeviceReport, where: Sequence[str]) -> Iterator[Advice]:
    stale = [kept for kept in report.recipes if kept.stale]
    if stale:
        yield Advice(
            f"{counted(len(stale), 'recipe')} with stale kernels: {_groups(kept.recipe for kept in stale)}.",
            "Their forms still hold; their products run today's winners instead of the kernels that were timed.",
            _tune((kept.recipe.group for kept in stale), stale[0].recipe.dtype, where),
        )


def _disturbed(report: DeviceReport, where: Sequence[str]) -> Iterator[Advice]:
    def unsteady(measurement: Measurement | None) -> bool:
        return measurement is not None and (measurement.disturbed or bool(measurement.resources.get("clock_moved")))

    won = [product for product in report.products if unsteady(product.best)]
    chains = [chain.recipe for _, chain in report.chains if unsteady(chain.measurement)]
    quiet = ["--device", report.device.kind, "--cache", "quiet.sqlite"]
    meaning = "Such times are too long and may have made another win. Tune into a new file on a quiet machine."
    if won:
        finding = f"{counted(len(won), 'winner was', 'winners were')} timed while other processes or a moving clock "
        yield Advice(
            f"{finding}disturbed it: {_labels(won)}.", meaning, _tune_problems([each.problem for each in won], quiet)
        )
    if chains:
        finding = f"{counted(len(chains), 'chain was', 'chains were')} timed while other processes or a moving clock "
        yield Advice(
            f"{finding}disturbed it: {_groups(chains)}.", meaning,
            "" if won else _tune((each.group for each in chains), chains[0].dtype, quiet),
        )


def _unplanned(report: DeviceReport, where: Sequence[str]) -> Iterator[Advice]:
    tuned = [product.problem for product in report.products if product.winner is not None]
    planned = {kept.recipe.group for kept in report.recipes}
    lacking = [problem for problem in tuned if any(group not in planned for group in groups_of([problem]))]
    if lacking:
        groups = [group for group in groups_of(lacking) if group not in planned]
        yield Advice(
            f"{counted(len(groups), 'group')} without a recipe: {_named(group.label() for group in groups)}.",
            "The run was interrupted before its end, where recipes are written; the same command goes on.",
            _tune_problems(lacking, where),
        )


def _untimed(report: DeviceReport, where: Sequence[str]) -> Iterator[Advice]:
    untimed = [kept.recipe for kept in report.recipes if not kept.recipe.timed and not kept.stale]
    if untimed:
        yield Advice(
            f"{counted(len(untimed), 'recipe')} without a timed chain: {_groups(untimed)}.",
            "Their cost is the sum of their products' times: the budget ended first, or every chain failed. The same "
            "command goes on where it stopped.",
            _tune((each.group for each in untimed), untimed[0].dtype, where),
        )


def _unpriced(report: DeviceReport, where: Sequence[str]) -> Iterator[Advice]:
    """A shape's costs may stand in several recipes: each is told of the whole shape's."""
    current = [kept.recipe for kept in report.recipes if kept.recipe.timed and not kept.stale]
    known = {
        (replace(each.group, batch=batch), each.dtype)
        for each in current for batch in (each.group.batch, *dict(each.batch_costs))
    }
    known |= {(chain.recipe.group, chain.recipe.dtype) for _, chain in report.chains if not chain.measurement.ok}
    unpriced = [each for each in current if any((smaller, each.dtype) not in known for smaller in _smaller(each.group))]
    if unpriced:
        yield Advice(
            f"{counted(len(unpriced), 'recipe')} not timed at every smaller batch: {_groups(unpriced)}.",
            "The budget ended first. Whoever divides matrices among ranks needs these costs; the same command goes on.",
            _tune((each.group for each in unpriced), unpriced[0].dtype, where),
        )


def _smaller(group: Group) -> list[Group]:
    """Batches of a power of two below the group's."""
    sizes = [2**power for power in range(group.batch.bit_length())]
    return [replace(group, batch=size) for size in sizes if size < group.batch]


def _unmeasured(report: DeviceReport, where: Sequence[str]) -> Iterator[Advice]:
    """Problems that lack a kernel which was measured on this device for others of their op."""
    measured: dict[str, set[str]] = {}
    for _, trial in report.trials:
        measured.setdefault(trial.key.problem.op, set()).add(trial.key.kernel)
    lacking = [
        (product.problem, name)
        for product in report.products
        for name in sorted(measured[product.problem.op] - {kernel for kernel, _ in product.attempts})
        if _serves(name, product.problem, report.device) and (product.winner is None or product.winner.stale is None)
    ]
    if lacking:
        problems = list(dict.fromkeys(problem for problem, _ in lacking))
        yield Advice(
            f"{counted(len(problems), 'problem')} without a measurement of a kernel that serves them: "
            f"{_named(f'{name} for {problem.label()}' for problem, name in lacking)}.",
            "The budget ended first, or the run was limited to other backends. The same command goes on.",
            _tune_problems(problems, where),
        )


def _serves(name: str, problem: Problem, device: DeviceFingerprint) -> bool:
    return any(spec.name == name and spec.serves(problem, device) for spec in kernels(problem.op))

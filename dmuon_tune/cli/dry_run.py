"""``dmuon-tune tune --dry-run``: what a run would measure, what the cache holds of it and how long it takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import NoLegalConfigError
from dmuon_tune.words import counted

from . import caches, workload
from .options import ALL_TRIALS
from .output import microseconds, note, print_json, say, table

if TYPE_CHECKING:
    from dmuon_tune.cache import Store
    from dmuon_tune.device import DeviceFingerprint
    from dmuon_tune.problem import Problem
    from dmuon_tune.search import TuneOptions
    from dmuon_tune.search.plan import TunePlan


def run(args: argparse.Namespace, work: workload.Workload, chosen: TuneOptions, place: str | None) -> int:
    """Print each problem's kernels and what the cache at ``place`` leaves to measure; nothing is measured, no cache
    made."""
    with caches.known(place, may_be_new=True) as store:
        return _run(args, work, chosen, store)


def _run(args: argparse.Namespace, work: workload.Workload, chosen: TuneOptions, store: Store) -> int:
    from dmuon_tune.backends.probe import fingerprint
    from dmuon_tune.recipe import default_dtype
    from dmuon_tune.search import plan
    from dmuon_tune.search.kernel_search import usable_kernels
    from dmuon_tune.search.workload import ends
    from dmuon_tune.search.workload import workload as workload_of

    device = fingerprint(chosen.device_names()[0])
    dtype = args.dtype or default_dtype(device.kind)
    specs, _ = usable_kernels(device, args.backends)
    problems = [*workload_of(work.groups, dtype, specs, device), *ends(work.groups, dtype, specs, device)]
    rows = [row for problem in problems for row in _spaces(problem, device, args.backends)]
    legal = {row["label"] for row in rows if row["legal"]}
    none = [problem for problem in problems if problem.label() not in legal]
    if args.format != "json":
        cells = [[row["label"], row["kernel"], row["legal"], row["refusal"]] for row in rows]
        say(table(["problem", "kernel", "legal_configs", "refusal"], cells))
    if none:
        raise NoLegalConfigError(f"{none[0].label()}: no kernel of the chosen backends has a legal configuration here")
    found = plan(work.groups, store, chosen)
    if args.format == "json":
        print_json({
            "model": work.label, "device": device.to_dict(), "dry_run": True, "spaces": rows, **_fields(found, chosen),
        })
    else:
        _print(found, chosen)
    return 0


def _fields(found: TunePlan, chosen: TuneOptions) -> dict[str, Any]:
    return {
        "trials": "all" if chosen.trials == ALL_TRIALS else chosen.trials,
        "budget_s": chosen.budget_s,
        "estimate_s": round(found.estimate_s, 1),
        "pace_s": round(found.pace_s, 3),
        "pace_measured": found.is_measured,
        "problems": [
            {
                "problem": each.problem.to_dict(), "label": each.problem.label(), "share": round(each.share, 4),
                "kernels": each.legal, "legal": sum(each.legal.values()), "known": each.known,
                "planned": each.planned, "best_us": each.best_us,
            }
            for each in found.problems
        ],
    }


def _print(found: TunePlan, chosen: TuneOptions) -> None:
    cells = [
        [
            each.problem.label(), f"{each.share:.1%}" if each.share else None, len(each.legal),
            sum(each.legal.values()), each.known, each.planned, microseconds(each.best_us),
        ]
        for each in found.problems
    ]
    say()
    say(table(["problem", "of_flops", "kernels", "legal_configs", "in_cache", "planned", "best_us"], cells))
    planned = sum(each.planned for each in found.problems)
    how = "as measured before" if found.is_measured else "a guess, nothing was measured here yet"
    cut_short = chosen.budget_s is not None and chosen.budget_s < found.estimate_s
    limit = f", of which the run does {chosen.budget_s:.0f} s" if cut_short else ""
    note(
        f"{counted(planned, 'configuration')}, their races and whole chains take about {found.estimate_s:.0f} s "
        f"({found.pace_s:.2g} s a configuration: {how}){limit}"
    )


def _spaces(problem: Problem, device: DeviceFingerprint, names: tuple[str, ...] | None) -> list[dict[str, Any]]:
    from dmuon_tune.kernel_specs import kernels

    from .reasons import refusal

    rows = []
    for spec in kernels(problem.op):
        if names is not None and spec.backend not in (*names, "library"):  # the baseline is always measured
            continue
        refused = refusal(spec, problem, device)
        rows.append({
            "problem": problem.to_dict(),
            "label": problem.label(),
            "kernel": spec.name,
            "legal": 0 if refused else len(spec.legal_space(problem, device)),
            "refusal": refused,
        })
    return rows

"""``dmuon-tune explain``: which kernel training will run for each product, from which cache, and why not another."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import MissingEntryError

from . import caches, options, workload
from .output import config_text, microseconds, note, print_json, table

if TYPE_CHECKING:
    from dmuon_tune.device import DeviceFingerprint
    from dmuon_tune.problem import Problem
    from dmuon_tune.runtime import Plan


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "explain", parents=[options.common(), options.model(), options.device(), options.cache()],
        help="explain which kernel training will run and why",
        description="Resolve every product as training does: the chosen entry, its origin and cache layer, every "
        "candidate, and for a miss the field in which the nearest entry differs.",
    )
    parser.add_argument(
        "--require", action="store_true", help="exit with code 3 where a product has no tuned entry"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    work = workload.of(args)
    from dmuon_tune.cache import Layers
    from dmuon_tune.runtime import plan

    environ = dict(os.environ)
    if args.cache:  # the named file first; the layers below it as in training
        caches.unreadable_code(args.cache)
        environ["DMUON_TUNE_CACHE_PATH"] = os.path.abspath(args.cache)
    with Layers.open(environ) as layers:
        resolved = plan(work.groups, args.device, args.dtype, layers, on_miss="heuristic")
    chosen = {row["problem"]: row for row in resolved.rows()}
    with caches.opened(args.cache) as found:
        candidates = _candidates(resolved, chosen, found)
    if args.format == "json":
        print_json({
            "device": resolved.fingerprint.to_dict(), "products": resolved.rows(), "candidates": candidates,
            "missing": [problem.label() for problem in resolved.missing], "command": resolved.command,
        })
    else:
        _print(resolved, candidates)
    if resolved.missing and args.require:
        raise MissingEntryError(f"{len(resolved.missing)} products have no tuned entry; run: {resolved.command}")
    return 0


def _candidates(
    resolved: Plan, chosen: dict[str, dict[str, Any]], found: list[caches.OpenCache]
) -> list[dict[str, Any]]:
    from dmuon_tune.kernel_specs import kernels

    from .reasons import refusal

    rows: list[dict[str, Any]] = []
    for problem in _problems(resolved):
        entries = _entries(problem, resolved.fingerprint, found)
        pick = chosen[problem.label()]
        for entry in entries:
            same = all(entry[name] == pick[name] for name in ("kernel", "layer", "config"))
            entry["verdict"] = "chosen" if same and entry["current"] else entry["verdict"]
        rows += entries
        usable = {entry["kernel"] for entry in entries if entry["current"]}
        for spec in kernels(problem.op):
            refused = refusal(spec, problem, resolved.fingerprint)
            if refused or spec.name not in usable:
                verdict = f"refused: {refused}" if refused else "no entry"
                rows.append(_row(problem, spec.name, None, None, None, False, verdict))
    return rows


def _problems(resolved: Plan) -> list[Problem]:
    return list(dict.fromkeys(
        bound.problem for planned in resolved.groups.values() for bound in planned.bindings.values()
    ))


def _entries(problem: Problem, device: DeviceFingerprint, found: list[caches.OpenCache]) -> list[dict[str, Any]]:
    from .reasons import staleness

    rows = []
    for cache in found:
        for entry in cache.store.entries(problem):
            stale = staleness(entry, device)
            label = "path" if cache.label == "file" else cache.label
            median_us = entry.measurement.median_us
            rows.append(
                _row(problem, entry.key.kernel, label, entry.config, median_us, not stale, stale or "not the winner")
            )
    return rows


def _row(
    problem: Problem, kernel: str, layer: str | None, config: dict[str, Any] | None, median_us: float | None,
    current: bool, verdict: str,
) -> dict[str, Any]:
    return {
        "problem": problem.label(), "kernel": kernel, "layer": layer, "config": config, "median_us": median_us,
        "current": current, "verdict": verdict,
    }


def _print(resolved: Plan, candidates: list[dict[str, Any]]) -> None:
    print(table(
        ["group", "form", "problem", "count", "origin", "layer", "kernel", "config", "median_us"],
        [
            [
                row["group"], row["form"], row["problem"], row["count"], row["origin"], row["layer"] or None,
                row["kernel"], config_text(row["config"]), microseconds(row["median_us"]),
            ]
            for row in resolved.rows()
        ],
    ))
    print()
    print(table(
        ["candidate_for", "kernel", "layer", "config", "median_us", "verdict"],
        [
            [
                row["problem"], row["kernel"], row["layer"], config_text(row["config"] or {}) or None,
                microseconds(row["median_us"]), row["verdict"],
            ]
            for row in candidates
        ],
    ))
    if resolved.missing:
        note(f"{len(resolved.missing)} products have no tuned entry; to fill the gap run: {resolved.command}")

"""``dmuon-tune explain``: which kernel training will run for each product, from which cache, and why not another."""

from __future__ import annotations

import argparse
import os
import shlex
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import MissingEntryError
from dmuon_tune.problem import distance
from dmuon_tune.words import counted

from . import caches, options, workload
from .output import config_text, microseconds, print_json, say, table
from .show import recipe_table

if TYPE_CHECKING:
    from dmuon_tune.backends import CompiledKernel
    from dmuon_tune.cache import Layers, TuningKey
    from dmuon_tune.device import DeviceFingerprint
    from dmuon_tune.problem import Problem
    from dmuon_tune.runtime import Plan
    from dmuon_tune.runtime.plan import GroupPlan
    from dmuon_tune.runtime.resolve import Resolver

NEAR_MISSES = 2  # of other problems that are shown for a product without an entry


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "explain", parents=[options.common(), options.model(), options.device(), options.cache()],
        help="explain which kernel training will run and why",
        description="Resolve every product as training does: the chosen entry, its origin and cache layer, the "
        "group's recipe, what a step launches at its ends, every candidate, and for a miss the field in which the "
        "nearest entry differs.",
    )
    parser.add_argument(
        "--require", action="store_true", help="exit with code 3 where a product has no tuned entry"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the chosen kernels too, as training does, and say what fails"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    work = workload.of(args)
    import torch

    from dmuon_tune.cache import Layers
    from dmuon_tune.measure.build import compiled_kernel
    from dmuon_tune.runtime import plan
    from dmuon_tune.runtime.plan import ON_MISS_VARIABLE, device_context
    from dmuon_tune.runtime.resolve import Resolver

    environ = dict(os.environ)
    policy = environ.get(ON_MISS_VARIABLE) or "heuristic"
    if args.cache:  # the named file first; the layers below it as in training
        caches.described(args.cache)  # said plainly where it cannot be read
        environ["DMUON_TUNE_CACHE_PATH"] = args.cache if "://" in args.cache else os.path.abspath(args.cache)
    with Layers.open(environ) as layers:
        build = compiled_kernel if args.compile else _not_compiled
        on_miss = "heuristic" if policy in ("tune", "error") else policy  # the tables first; explaining tunes nothing
        resolved = plan(work.groups, args.device, args.dtype, layers, on_miss=on_miss, build=build)
        with device_context(torch.device(resolved.device)):
            resolver = Resolver(resolved.fingerprint, layers, on_miss == "nearest", build)
            at_ends = [found for planned in resolved.groups.values() for found in ends_of(planned, resolver)]
        described = layers.descriptions()
    ends = [row for _, row in at_ends]
    command = _completed(resolved.command, args)
    chosen = {row["problem"]: row for row in [*resolved.rows(), *ends]}
    problems = [*_problems(resolved), *dict.fromkeys(problem for problem, _ in at_ends)]
    with caches.opened(described) as found:
        candidates = _candidates(problems, resolved.fingerprint, chosen, found, layers)
    if args.format == "json":
        print_json({
            "device": resolved.fingerprint.to_dict(), "products": resolved.rows(), "ends": ends,
            "candidates": candidates,
            "recipes": [
                {**planned.recipe.to_dict(), "layer": planned.layer or None} for planned in resolved.groups.values()
            ],
            "missing": [problem.label() for problem in resolved.missing], "command": command,
        })
    else:
        _print(resolved, ends, candidates)
    if code := caches.exit_code(described):
        return code
    if resolved.missing and (args.require or policy == "error"):
        count = counted(len(resolved.missing), "product")
        raise MissingEntryError(f"no tuned entry for {count}; run: {command}")
    return 0


def _completed(command: str, args: argparse.Namespace) -> str:
    """A command that fills the gap where this one found it."""
    known = shlex.split(command)
    given = options.again(args)
    if "--device" in known and "--device" in given:
        del known[known.index("--device") :]
    return shlex.join([*known, *given]) if known else ""


def _not_compiled(*ignored: Any) -> CompiledKernel:
    from dmuon_tune.backends import CompiledKernel

    return CompiledKernel(launch=lambda *arguments: None)


def ends_of(planned: GroupPlan, resolver: Resolver) -> list[tuple[Problem, dict[str, Any]]]:
    """What an optimizer's step launches at a group's ends on a GPU, for bf16 weights with Nesterov momentum: (problem,
    a row as of a product). Where no kernel serves one, PyTorch does its work in more passes."""
    from dmuon_tune.recipe import Group, ends, first_launch

    if resolver.device.kind == "cpu":
        return []
    recipe, rows = planned.recipe, []
    group = recipe.group
    first = first_launch(group, recipe.dtype)
    found: dict[Problem, Problem | None] = {first: None}
    for size in dict.fromkeys(recipe.pieces):
        piece = Group(size, group.rows, group.cols)
        of_piece = ends(piece, recipe.form, recipe.dtype, recipe.steps, recipe.restarts)
        found |= {end: like for end, like in of_piece.items() if like is not None}
    for problem, like in found.items():
        bound = resolver.bind_end(problem, planned.bindings[like] if like else None)
        count = 1 if problem == first else recipe.pieces.count(problem.batch)
        rows.append((problem, {
            "group": group.label(), "form": recipe.form, "problem": problem.label(), "count": count,
            "origin": bound.origin if bound else "pytorch", "layer": bound.layer if bound else "",
            "kernel": bound.kernel if bound else None, "config": dict(bound.config) if bound else {},
            "median_us": bound.median_us if bound else None,
        }))
    return rows


def _candidates(
    problems: list[Problem], device: DeviceFingerprint, chosen: dict[str, dict[str, Any]],
    found: list[caches.OpenCache], layers: Layers,
) -> list[dict[str, Any]]:
    from dmuon_tune.kernel_specs import kernels

    from .reasons import refusal

    rows: list[dict[str, Any]] = []
    every = [(cache.label, entry) for cache in found for entry in cache.store.entries(device=device)]
    for problem in problems:
        entries = _entries(problem, device, found, layers)
        pick = chosen[problem.label()]
        for entry in entries:
            same = all(entry[name] == pick[name] for name in ("kernel", "layer", "config"))
            entry["verdict"] = "chosen" if same and entry["current"] else entry["verdict"]
        if pick["origin"] == "tuned" and all(entry["verdict"] != "chosen" for entry in entries):
            config, layer, median_us = pick["config"], pick["layer"], pick["median_us"]
            verdict = "chosen in the recipe's chain"
            entries.append(_row(problem, pick["kernel"], layer, config, median_us, True, verdict))
        if pick["origin"] != "tuned":
            entries += _near_misses(problem, every)
        rows += entries
        usable = {entry["kernel"] for entry in entries if entry["current"]}
        for spec in kernels(problem.op):
            refused = refusal(spec, problem, device)
            if spec.name in usable and spec.serves(problem, device):  # by its artefact where its DSL is not here
                refused = None
            if refused or spec.name not in usable:
                verdict = f"refused: {refused}" if refused else "no entry"
                rows.append(_row(problem, spec.name, None, None, None, False, verdict))
    return rows


def _problems(resolved: Plan) -> list[Problem]:
    return list(dict.fromkeys(
        bound.problem for planned in resolved.groups.values() for bound in planned.bindings.values()
    ))


def _entries(
    problem: Problem, device: DeviceFingerprint, found: list[caches.OpenCache], layers: Layers
) -> list[dict[str, Any]]:
    from dmuon_tune.measure.standing import staleness

    rows = []
    for cache in found:
        for entry in cache.store.entries(problem):
            stale, median_us = staleness(entry.key, device), entry.measurement.median_us
            if stale and entry.key.device == device and _is_shipped(layers, entry.key, entry.config):
                stale = None
            verdict = stale or "not the winner"
            rows.append(_row(problem, entry.key.kernel, cache.label, entry.config, median_us, not stale, verdict))
    return rows


def _is_shipped(layers: Layers, key: TuningKey, config: dict[str, Any]) -> bool:
    """Whether the caches hold compiled code of today's source, whichever toolchain made it."""
    from dmuon_tune.cache import ArtefactError
    from dmuon_tune.kernel_specs import kernels
    from dmuon_tune.measure.build import is_of_todays_code

    if not any(is_of_todays_code(key, spec) for spec in kernels(key.problem.op)):
        return False
    try:
        return layers.artefact(key.sha256, config) is not None
    except ArtefactError:
        return False


def _near_misses(problem: Problem, every: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The entries whose problems differ in the fewest fields, the nearest first, and in which."""
    differing: list[tuple[int, float, str, Any, str]] = []
    for label, entry in every:
        other = entry.key.problem
        if other.op != problem.op or other == problem:
            continue
        fields = problem.differences(other)
        verdict = "other " + ", ".join(f"{name}: {then}, here {now}" for name, (now, then) in fields.items())
        differing.append((len(fields), distance(problem, other), label, entry, verdict))
    nearest = sorted(differing, key=lambda miss: (miss[:3], miss[3].measurement.median_us))[:NEAR_MISSES]
    return [
        _row(problem, entry.key.kernel, label, entry.config, entry.measurement.median_us, False, verdict)
        for _, _, label, entry, verdict in nearest
    ]


def _row(
    problem: Problem, kernel: str, layer: str | None, config: dict[str, Any] | None, median_us: float | None,
    current: bool, verdict: str,
) -> dict[str, Any]:
    return {
        "problem": problem.label(), "kernel": kernel, "layer": layer, "config": config, "median_us": median_us,
        "current": current, "verdict": verdict,
    }


def _print(resolved: Plan, ends: list[dict[str, Any]], candidates: list[dict[str, Any]]) -> None:
    say(table(
        ["group", "form", "problem", "count", "origin", "layer", "kernel", "config", "median_us"],
        [
            [
                row["group"], row["form"], row["problem"], row["count"], row["origin"], row["layer"] or None,
                row["kernel"], config_text(row["config"]) or None, microseconds(row["median_us"]),
            ]
            for row in [*resolved.rows(), *ends]
        ],
    ))
    say()
    say(recipe_table([(planned.layer or None, planned.recipe) for planned in resolved.groups.values()]))
    say()
    say(table(
        ["candidate_for", "kernel", "layer", "config", "median_us", "verdict"],
        [
            [
                row["problem"], row["kernel"], row["layer"], config_text(row["config"] or {}) or None,
                microseconds(row["median_us"]), row["verdict"],
            ]
            for row in candidates
        ],
    ))

"""``dmuon-tune show``: the winners and recipes that the caches hold."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import caches, options
from .output import config_text, microseconds, print_json, ratio, say, table, warn

if TYPE_CHECKING:
    from dmuon_tune.cache import LayerDescription
    from dmuon_tune.measure.standing import Winner


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "show", parents=[options.common(), options.cache()], help="show tuned winners and recipes",
        description="Show each problem's fastest kernel and each group's recipe, from the caches of this machine, or, "
        "with --chains, what every whole chain took.",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument("--all-devices", action="store_true", help="results of every device, not only of this one")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--failures", action="store_true", help="the configurations that failed, with the reason")
    what.add_argument("--chains", action="store_true", help="every chain that was timed, with its kernels")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    device = None
    if not args.all_devices:
        from dmuon_tune.backends.probe import fingerprint

        device = fingerprint(args.device)
    layers = caches.described(args.cache)
    if args.failures:
        _print_failures(layers, device, args.format)
        return caches.exit_code(layers)
    if args.chains:
        _print_chains(layers, device, args.format)
        return caches.exit_code(layers)
    with caches.opened(layers) as opened:
        entries = [(cache.label, entry) for cache in opened for entry in cache.store.entries(device=device)]
        recipes: list[tuple[str | None, Any]] = [
            (cache.label, recipe) for cache in opened for recipe in cache.store.recipes(device)
        ]
    from dmuon_tune.measure.standing import winners as winners_of

    winners = winners_of(entries)
    if args.format == "json":
        print_json({
            "device": device and device.to_dict(),
            "winners": [
                {
                    **caches.entry_fields(found.entry), "layer": found.layer, "library_us": found.library_us,
                    "stale": found.stale,
                }
                for found in winners
            ],
            "recipes": [{**recipe.to_dict(), "layer": label} for label, recipe in recipes],
        })
    else:
        if not winners and not caches.exit_code(layers):  # else nobody knows what is tuned
            where = "on any device" if args.all_devices else "for this device"
            warn(f"nothing is tuned {where}; run 'dmuon-tune tune' with --preset, --model or --shapes")
        _print(winners, recipes, args.all_devices)
    return caches.exit_code(layers)


def _print(winners: list[Winner], recipes: list[tuple[str | None, Any]], all_devices: bool) -> None:
    headers = ["problem", "kernel", "config", "median_us", "library_us", "speedup", "layer", "state"]
    rows = [
        [
            found.entry.key.problem.label(), found.entry.key.kernel, config_text(found.entry.config),
            microseconds(found.entry.measurement.median_us), microseconds(found.library_us),
            ratio(found.library_us, found.entry.measurement.median_us), found.layer,
            _state(f"stale: {found.stale}" if found.stale else "current", found.entry.measurement),
            *([found.entry.key.device.name] if all_devices else []),
        ]
        for found in winners
    ]
    say(table([*headers, *(["device"] if all_devices else [])], rows))
    if recipes:
        say()
        say(recipe_table(recipes))


def _print_failures(layers: Sequence[LayerDescription], device: Any, output: str) -> None:
    with caches.opened(layers) as opened:
        failures = [
            (cache.label, trial)
            for cache in opened
            for trial in cache.store.all_trials()
            if not trial.measurement.ok and device in (None, trial.key.device)
        ]
        chains = [
            (cache.label, trial)
            for cache in opened
            for trial in cache.store.chain_trials(device)
            if not trial.measurement.ok
        ]
    if output == "json":
        print_json({
            "failures": [
                {
                    "problem": trial.key.problem.to_dict(), "kernel": trial.key.kernel, "config": trial.config,
                    "layer": layer, "status": trial.measurement.status, "log": trial.measurement.log,
                    "created_at": trial.created_at,
                }
                for layer, trial in failures
            ],
            "chains": [_chain_fields(layer, trial) for layer, trial in chains],
        })
        return
    rows = [
        [
            trial.key.problem.label(), trial.key.kernel, config_text(trial.config), layer, trial.measurement.status,
            trial.measurement.reason,
        ]
        for layer, trial in failures
    ]
    rows += [
        [
            trial.recipe.group.label(), f"{trial.recipe.form} chain", pieces_text(trial.recipe), layer,
            trial.measurement.status, trial.measurement.reason,
        ]
        for layer, trial in chains
    ]
    say(table(["problem", "kernel", "config", "layer", "status", "reason"], rows))


def _print_chains(layers: Sequence[LayerDescription], device: Any, output: str) -> None:
    with caches.opened(layers) as opened:
        trials = [(cache.label, trial) for cache in opened for trial in cache.store.chain_trials(device)]
    if output == "json":
        print_json({"chains": [_chain_fields(label, trial) for label, trial in trials]})
    else:
        say(chain_table(trials))


def _state(state: str, measurement: Any) -> str:
    """``state``, and whether other processes disturbed this timing, which is then too slow."""
    return f"{state}, disturbed" if measurement.resources.get("contended") else state


def recipe_table(recipes: list[tuple[str | None, Any]]) -> str:
    """One line a recipe: (layer label, recipe); the form without restarts shows none. ``pieces`` are the batch's, run
    one after another; ``cost_of`` says whether the whole chain was timed or its products' times are summed."""
    rows = [
        [
            recipe.group.label(), recipe.form, pieces_text(recipe), recipe.dtype, recipe.steps,
            ",".join(map(str, recipe.restarts)) if recipe.form != "plain" and recipe.restarts else None,
            microseconds(recipe.cost_us), microseconds(recipe.p20_us), microseconds(recipe.p80_us),
            None if recipe.cost_us is None else "timed chain" if recipe.timed else "sum of products",
            " ".join(f"{batch}:{microseconds(cost_us)}" for batch, cost_us in recipe.batch_costs) or None, label,
        ]
        for label, recipe in recipes
    ]
    headers = ["group", "form", "pieces", "dtype", "steps", "restarts", "cost_us", "p20_us", "p80_us", "cost_of"]
    return table([*headers, "batch:us", "layer"], rows)


def pieces_text(recipe: Any) -> str | None:
    """How a batch is cut: ``2x8`` for two pieces of eight; None where it runs at once."""
    if len(recipe.pieces) == 1:
        return None
    sizes = Counter(recipe.pieces)
    return "+".join(f"{count}x{size}" for size, count in sizes.items())


def chain_table(trials: list[tuple[str, Any]]) -> str:
    """One line a timed chain: (layer label, trial)."""
    rows = [
        [
            trial.recipe.group.label(), trial.recipe.form, pieces_text(trial.recipe), trial.recipe.dtype,
            microseconds(trial.measurement.median_us), microseconds(trial.measurement.p20_us),
            microseconds(trial.measurement.p80_us),
            None if trial.measurement.max_rel_err is None else f"{trial.measurement.max_rel_err:.3g}",
            _state(trial.measurement.status, trial.measurement), label,
            "; ".join(f"{pick.kernel} {config_text(pick.config)}" for pick in trial.recipe.picks),
        ]
        for label, trial in trials
    ]
    headers = ["group", "form", "pieces", "dtype", "median_us", "p20_us", "p80_us", "polar_error", "status", "layer"]
    return table([*headers, "kernels"], rows)


def _chain_fields(label: str, trial: Any) -> dict[str, Any]:
    return {
        "recipe": trial.recipe.to_dict(), "layer": label, **trial.measurement.to_dict(),
        "created_at": trial.created_at,
    }

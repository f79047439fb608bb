"""``dmuon-tune plan``: which rank would own which matrix, how long the slowest takes, and what other plans would."""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import UsageError
from dmuon_tune.recipe import Group
from dmuon_tune.words import counted

from . import caches, division, options, workload
from .output import check_writable, microseconds, note, print_json, ratio, say, table, warn, write_file

if TYPE_CHECKING:
    from dmuon_tune.device import DeviceFingerprint
    from dmuon_tune.runtime.ownership import Assignment, Work

GIB = 2**30


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", parents=[options.common(), options.model(), options.cache()],
        help="divide a model's matrices among ranks and say how long the slowest takes",
        description="Assign every matrix to the rank that orthogonalizes it, so that the slowest is done as early as "
        "possible, by the costs of whole chains in this machine's caches; what was not timed is estimated and marked "
        "(~). Beside it: plans that know no costs. No GPU is needed.",
    )
    group = parser.add_argument_group("plan")
    division.add_options(group, needed=True)
    group.add_argument("--nodes", type=options.positive, default=1, metavar="N", help="that they lie on (default: 1)")
    group.add_argument(
        "--solve-seconds", type=partial(options.seconds, or_none=True), default=2.0, metavar="S",
        help="for improvement of the longest-first plan; 0: none (default: 2)",
    )
    group.add_argument("--seed", type=_seed, default=0, help="of the search (default: 0)")
    group.add_argument("--memory-gb", type=_gibibytes, metavar="GIB", help="of momentum on a rank, at most")
    group.add_argument("--plot", type=options.place, metavar="FILE", help="draw the owners' times as a PNG image")
    group = parser.add_argument_group("device")
    group.add_argument(
        "--device", default="auto",
        help="whose costs: auto, cpu, cuda, cuda:<index>, or a device in the caches by part of its name, such as h200 "
        "(default: this machine's GPU, else the one in the caches)",
    )
    group.add_argument(
        "--dtype", type=options.dtype, metavar="DTYPE",
        help="of the chains (default: float16 on a GPU, float32 on a CPU)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = workload.of(args)
    if args.plot:
        from dmuon_tune.report import require_matplotlib

        require_matplotlib()
        check_writable("--plot", Path(args.plot))
    layers = caches.described(args.cache)
    with caches.opened(layers) as opened:
        device = _device(args.device, opened)
        divided = division.divide(args, found, device, [cache.store for cache in opened])
    from dmuon_tune.runtime.ownership import assign
    from dmuon_tune.runtime.ownership.solve import has_highs

    work = divided.work
    memory_bytes = None if args.memory_gb is None else int(args.memory_gb * GIB)
    solved = assign(
        work, args.world_size, nodes=args.nodes, seconds=args.solve_seconds, seed=args.seed, memory_bytes=memory_bytes
    )
    plans = {"ours": solved.owner, **_baselines(work, args.world_size)}
    loads = {name: _loads(work, owner, args.world_size) for name, owner in plans.items()}
    shapes = _shapes(work, solved)
    batches = divided.batches(solved.owner)
    _say_what_is_known(found, args, device, divided.timed, shapes)
    if not has_highs():
        warn("without HiGHS local search alone ran, and the bound is a simple one; pip install 'dmuon-tune[ownership]'")
    if args.plot:
        title = f"{found.label}: {counted(args.world_size, 'owner')}, {device.name}"
        _draw(Path(args.plot), title, loads, solved.bound_us)
    if args.format == "json":
        print_json(_json(args, found, device, solved, loads, shapes, work, batches))
    else:
        _print(args, solved, loads, shapes, work)
    _say_what_runs(args, batches, divided.untuned(batches))
    return caches.exit_code(layers)


def _device(wanted: str, opened: Sequence[caches.OpenCache]) -> DeviceFingerprint:
    """This machine's device, or one that the caches hold chains of."""
    from dmuon_tune.backends.probe import fingerprint

    if re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        return fingerprint(wanted)
    known = dict.fromkeys(
        device for cache in opened for device in (
            *(entry.key.device for entry in cache.store.entries()),
            *(trial.device for trial in cache.store.chain_trials()),
        )
    )
    if wanted == "auto":
        here = fingerprint("auto")
        gpus = [device for device in known if device.kind == "cuda"]
        if here.kind == "cuda" or not gpus:
            return here
        if len(gpus) == 1:
            return gpus[0]
        raise UsageError(f"the caches hold several GPUs; name one by --device: {_names(gpus)}")
    named = [device for device in known if wanted.lower() in device.name.lower()]
    if len(named) != 1:
        what = "several devices" if named else "no device"
        raise UsageError(f"--device {wanted!r} is {what} of the caches; they hold {_names(named or known) or 'none'}")
    return named[0]


def _names(devices: Any) -> str:
    return ", ".join(f"{device.name} ({device.arch}, {device.sm_count} multiprocessors)" for device in devices)


def _baselines(work: Sequence[Work], owners: int) -> dict[str, tuple[int, ...]]:
    from dmuon_tune.runtime.ownership import baselines

    return {
        "FLOP-balanced": baselines.flop_balanced(work, owners),
        "round-robin": baselines.round_robin(work, owners),
        "count-balanced": baselines.count_balanced(work, owners),
    }


def _loads(work: Sequence[Work], owner: Sequence[int], owners: int) -> tuple[float, ...]:
    from dmuon_tune.runtime.ownership.baselines import loads_us

    return loads_us(work, owner, owners)


def _shapes(work: Sequence[Work], solved: Assignment) -> list[dict[str, Any]]:
    """For each shape how its matrices are divided, and what that costs."""
    rows = []
    priced = {(item.rows, item.cols): item.costs for item in work}
    for (height, width), costs in priced.items():
        held = Counter(
            owner for owner, item in zip(solved.owner, work, strict=True) if (item.rows, item.cols) == (height, width)
        )
        sizes = Counter(held.values())
        measured = [costs.measured(size) for size in sizes]
        rows.append({
            "rows": height, "cols": width, "count": sum(held.values()),
            "batches": {size: sizes[size] for size in sorted(sizes)},
            "us": {size: costs.us(size) for size in sorted({1, *sizes})},
            "measured": {size: costs.measured(size) for size in sorted({1, *sizes})},
            "costs": "measured" if all(measured) else "in part" if any(measured) else "estimated",
        })
    return sorted(rows, key=lambda row: (row["rows"] * row["cols"], row["rows"]))


def _say_what_is_known(
    found: workload.Workload, args: argparse.Namespace, device: DeviceFingerprint, chains: int,
    shapes: Sequence[dict[str, Any]],
) -> None:
    from dmuon_tune.runtime.ownership.pricing import DEFAULT_RATES

    matrices = counted(sum(row["count"] for row in shapes), "matrix", "matrices")
    places = f"{counted(args.world_size, 'owner')} on {counted(args.nodes, 'node')}"
    note(f"{found.label}: {matrices} of {counted(len(shapes), 'shape')} to {places}, by costs of {device.name}")
    guessed = [row for row in shapes if row["costs"] != "measured"]
    if not guessed:
        return
    how = (
        f"the nearest of {counted(chains, 'timed batch', 'timed batches')}"
        if chains else f"{DEFAULT_RATES[device.kind] / 1e6:g} TFLOP/s, as nothing is timed for it"
    )
    warn(
        f"costs of {len(guessed)} of {counted(len(shapes), 'shape')} are estimated, by FLOPs at the rate of {how}; "
        "'dmuon-tune tune' on that device times chains"
    )


def _say_what_runs(args: argparse.Namespace, batches: Sequence[Group], untuned: Sequence[Group]) -> None:
    run = f"owners run {counted(len(batches), 'kind of batch', 'kinds of batches')}"
    if not untuned:
        note(f"{run}, all tuned")
        return
    shapes = ",".join(batch.label() for batch in untuned)
    dtype = ["--dtype", args.dtype] if args.dtype else []
    command = shlex.join(["dmuon-tune", "tune", "--shapes", shapes, *dtype, *options.again(args)])
    note(f"{run}, {len(untuned)} of them not tuned; to fill the gap run: {command}")


def _draw(path: Path, title: str, loads: dict[str, tuple[float, ...]], bound_us: float) -> None:
    from dmuon_tune.report import owners_plot, to_png

    write_file(path, to_png(owners_plot(title, loads, bound_us)))


def _spread(args: argparse.Namespace, solved: Assignment, work: Sequence[Work]) -> tuple[float, float]:
    """(Owners, nodes) that a layer's matrices lie on, in the mean."""
    on_node = args.world_size // args.nodes
    owners: dict[int, set[int]] = {}
    for owner, item in zip(solved.owner, work, strict=True):
        owners.setdefault(item.layer, set()).add(owner)
    nodes = [len({owner // on_node for owner in its}) for its in owners.values()]
    return sum(map(len, owners.values())) / len(owners), sum(nodes) / len(owners)


def _print(
    args: argparse.Namespace, solved: Assignment, loads: dict[str, tuple[float, ...]],
    shapes: Sequence[dict[str, Any]], work: Sequence[Work],
) -> None:
    say(table(
        ["plan", "makespan_us", "over_bound", "ours_faster", "least_us", "median_us", "sum_us"],
        [
            [
                f"ours ({solved.method})" if name == "ours" else name, microseconds(max(its)),
                f"{max(0.0, max(its) / solved.bound_us - 1):.2%}", ratio(max(its), solved.makespan_us),
                microseconds(min(its)), microseconds(median(its)), microseconds(sum(its)),
            ]
            for name, its in loads.items()
        ] + [["bound", microseconds(solved.bound_us), None, None, None, None, None]],
    ))
    say()
    say(table(
        ["rows", "cols", "count", "costs", "owners_x_batch", "batch:us"],
        [
            [
                row["rows"], row["cols"], row["count"], row["costs"],
                " ".join(f"{owners}x{size}" for size, owners in row["batches"].items()),
                " ".join(
                    f"{size}:{'' if row['measured'][size] else '~'}{microseconds(us)}" for size, us in row["us"].items()
                ),
            ]
            for row in shapes
        ],
    ))
    owners, nodes = _spread(args, solved, work)
    of_nodes = f" of {_mean(nodes, 'node')}" if args.nodes > 1 else ""
    note(f"a layer's matrices lie on {_mean(owners, 'owner')}{of_nodes} in the mean")


def _mean(number: float, name: str) -> str:
    return f"{number:.3g} {name}" + ("" if number == 1 else "s")


def _json(
    args: argparse.Namespace, found: workload.Workload, device: DeviceFingerprint, solved: Assignment,
    loads: dict[str, tuple[float, ...]], shapes: list[dict[str, Any]], work: Sequence[Work], batches: Sequence[Group],
) -> dict[str, Any]:
    owners, nodes = _spread(args, solved, work)
    names = [(each.name, place) for each in found.selection.matrices for place in range(each.count)]
    return {
        "model": found.label, "device": device.to_dict(), "owners": args.world_size, "nodes": args.nodes,
        "seed": args.seed, "method": solved.method, "makespan_us": solved.makespan_us, "bound_us": solved.bound_us,
        "gap": solved.gap, "owners_of_a_layer": owners, "nodes_of_a_layer": nodes,
        "plans": {
            name: {"makespan_us": max(its), "least_us": min(its), "median_us": median(its), "loads_us": its}
            for name, its in loads.items()
        },
        "shapes": shapes, "batches": [batch.label() for batch in batches],
        "matrices": [
            {"name": name, "index": place, "rows": item.rows, "cols": item.cols, "owner": owner}
            for (name, place), item, owner in zip(names, work, solved.owner, strict=True)
        ],
    }


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 999999999")
    return int(text)


def _gibibytes(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of GiB")
    return float(text)

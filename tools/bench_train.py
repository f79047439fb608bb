"""Compares optimizers in training on FSDP2: whole steps, their phases, memory and traffic, in one run and one table.

    torchrun --nproc-per-node 2 tools/bench_train.py [--preset qwen2.5-0.5b qwen2.5-1.5b] [--json out.json]

Every variant trains a decoder of the preset's numbers from the same seed on the same random tokens: bf16 compute, fp32
weights and gradients in shards, AdamW for embeddings, head, norms and biases. ``step_ms`` is the time of a step in a
row of steps that is waited for at its end: median, p20 and p80. ``forward``, ``backward`` and ``optimizer`` are waited
for one by one on all ranks, in ms: medians of the slowest rank. ``sent_MB`` is what the optimizer sends to other ranks
in a step, ``runs`` the matrices orthogonalized in it, both over all ranks; ``first_s`` the first step with all that is
planned and compiled for it. ``x_adamw`` is the step over AdamW's, ``faster`` gather-then-compute's optimizer time over
this one's. All variants run ``--repeat`` times, every second time in reverse order, as a device's clock drifts; figures
are medians over these passes. With ``--still`` learning rates are 0, so that all compute on the same numbers: a card at
its power limit is slower on some than on others. Run ``dmuon-tune tune --preset ... --world-size ...`` first. A rank
that fails ends the run: torchrun reports that rank's exit code, 2 for what cannot be asked, and itself returns 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _bench_model import RECOMPUTED_PARAMETERS, numbers_of, sharded, trainable
from _bench_trace import traced
from _bench_training import PROGRAM, Training, World, measure, timed_us
from _bench_variants import DEDICATED, EARLY, VARIANTS, Setting, Variant
from _runner import Parser, check_writable, note, run
from bench_ns import digits, names, versions
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cli.options import positive
from dmuon_tune.coefficients import coefficient_set
from dmuon_tune.errors import UsageError, outcome
from dmuon_tune.runtime.distributed.rounds import BUCKET_BYTES
from dmuon_tune.words import counted

Row = dict[str, Any]
TRACED_STEPS = 2


def train(
    world: World, device: torch.device, preset: str, key: str, setting: Setting, options: argparse.Namespace
) -> Row:
    """One variant from the seed's model to its figures; what it held is freed."""
    numbers = numbers_of(preset, options.layers)
    mesh = init_device_mesh(device.type, (world.size,))
    model = sharded(numbers, mesh, device, options.seed, recomputes(preset, options), key in (DEDICATED, EARLY))
    if options.compile:
        for block in model.layers:
            block.body = torch.compile(block.body, fullgraph=True, dynamic=False)
    rng = torch.Generator(device).manual_seed(options.seed * world.size + world.rank)
    shape = options.batch, options.sequence + 1

    def batch() -> Tensor:
        return torch.randint(numbers.vocabulary, shape, device=device, generator=rng)

    label, make = VARIANTS[key]
    made: list[Variant] = []
    make_us = timed_us(world, lambda: made.append(make(model, setting)))
    training = Training(model, made.pop(), batch)
    row = measure(world, training, options.steps)
    if options.trace:
        row["communication"] = communication(world, training, device, options.trace / f"{preset}-{key}")
    row["first_us"]["make"] = max(world.all(make_us))
    row["tokens"] = world.size * options.batch * options.sequence
    return {"preset": preset, "variant": key, "optimizer": label, "model": asdict(numbers), **row}


def communication(world: World, training: Training, device: torch.device, path: Path) -> dict[str, float] | None:
    """Of the rank that communicates longest: microseconds a step, and the share of them beside which it computes."""
    world.settle()
    found = world.all(traced(training.step, device, TRACED_STEPS, path.with_name(f"{path.name}-{world.rank}.json")))
    if found[0] is None:
        return None
    us, hidden = max(found)
    return {"us": us, "hidden": hidden}


def recomputes(preset: str, options: argparse.Namespace) -> bool:
    """Whether blocks are recomputed in the backward."""
    if options.checkpoint is None:
        return numbers_of(preset, options.layers).parameters >= RECOMPUTED_PARAMETERS
    return bool(options.checkpoint)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def passes_of(
    world: World, device: torch.device, preset: str, setting: Setting, options: argparse.Namespace
) -> Iterator[list[Row]]:
    """The rows of a preset's variants, each the medians over the passes so far; after each that was measured."""
    keys = [key for key in VARIANTS if key in options.variants]
    passes: dict[str, list[Row]] = {key: [] for key in keys}
    for turn in range(options.repeat):
        if options.compile:
            torch.compiler.reset()  # a function has few compiled versions before torch.compile gives up on it
        for key in reversed(keys) if turn % 2 else keys:
            row = train(world, device, preset, key, setting, options)
            release()
            passes[key].append(row)
            if world.rank == 0:
                note(f"{preset}, pass {turn + 1} of {options.repeat}, {row['optimizer']}: {row['median_us'] / 1e3:.2f} "
                     "ms a step", PROGRAM)
            rows = [over_passes(some) for some in passes.values() if some]
            for each in rows:
                relate(each, rows)
            yield rows


def over_passes(passes: Sequence[Row]) -> Row:
    """One row of a variant's: medians, but of what is the same in all, or comes once, the first pass's; the step and
    its phases pass by pass."""
    once = {name: passes[0][name] for name in ("model", "first_us", "losses")}
    each = [{"median_us": row["median_us"], "phases_us": row["phases_us"]} for row in passes]
    return {**medians(passes), **once, "passes": each}


def medians(figures: Sequence[Any]) -> Any:
    """Of floats, wherever they are in dictionaries and lists of the same form; else the first one's."""
    first = figures[0]
    if isinstance(first, dict):
        return {name: medians([each[name] for each in figures if name in each]) for name in first}
    if isinstance(first, list):
        return [medians(each) for each in zip(*figures, strict=True)]
    return median(figures) if isinstance(first, float) else first


def relate(row: Row, others: Sequence[Row]) -> None:
    """Add tokens a second; the step over AdamW's and gather-then-compute's optimizer time over this one's, where those
    were measured."""
    row["tokens_per_s"] = row["tokens"] / row["median_us"] * 1e6
    beside = {other["variant"]: other for other in others}
    if "adamw" in beside:
        row["over_adamw"] = row["median_us"] / beside["adamw"]["median_us"]
    if "gather-then-compute" in beside and row["variant"] != "adamw":
        row["faster"] = beside["gather-then-compute"]["phases_us"]["optimizer"] / row["phases_us"]["optimizer"]


def scaled(by: float, places: int, *path: str) -> Callable[[Row], str]:
    """The text of a row's figure over ``by``."""

    def text(row: Row) -> str:
        value: Any = row
        for name in path:
            value = value.get(name) if value is not None else None
        return digits(None if value is None else value / by, places)

    return text


COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("step_ms", 9, scaled(1e3, 2, "median_us")), ("p20", 9, scaled(1e3, 2, "p20_us")),
    ("p80", 9, scaled(1e3, 2, "p80_us")), ("tokens/s", 10, scaled(1, 0, "tokens_per_s")),
    ("forward", 9, scaled(1e3, 2, "phases_us", "forward")), ("backward", 9, scaled(1e3, 2, "phases_us", "backward")),
    ("optimizer", 9, scaled(1e3, 2, "phases_us", "optimizer")), ("peak_GB", 8, scaled(1e9, 2, "peak_bytes")),
    ("sent_MB", 10, scaled(1e6, 3, "sent_bytes")), ("runs", 6, scaled(1, 0, "runs")),
    ("first_s", 8, lambda row: digits(sum(row["first_us"].values()) / 1e6, 2)),
    ("x_adamw", 8, scaled(1, 3, "over_adamw")), ("faster", 7, scaled(1, 2, "faster")),
    ("loss", 7, lambda row: digits(row["losses"][-1], 3)),
)


def print_line(preset: str, optimizer: str, cells: Sequence[str]) -> None:
    widths = [width for _, width, _ in COLUMNS]
    figures = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    print(f"{preset:<13} {optimizer:<25} {figures}", flush=True)


def print_row(row: Row) -> None:
    print_line(row["preset"], row["optimizer"], [text(row) for _, _, text in COLUMNS])
    steps, updates = ([each["median_us"] for each in row["passes"]], [
        each["phases_us"]["optimizer"] for each in row["passes"]
    ])
    if len(steps) > 1:
        print_more(f"between passes, ms: step {between(steps)}, optimizer {between(updates)}")
    if row.get("communication"):
        carried = row["communication"]
        hidden = f"{carried['hidden']:.1%} of it beside computation"
        print_more(f"communication: {carried['us'] / 1e3:.2f} ms a step, {hidden}")
    owned = row["ownership"]
    if owned:
        predicted, alone, inside = (max(owned[name]) for name in ("predicted_us", "alone_us", "inside_us"))
        print_more(
            f"slowest owner, ms: predicted {predicted / 1e3:.3f} (bound {owned['bound_us'] / 1e3:.3f}, gap "
            f"{owned['gap']:.2%}), its batches alone {alone / 1e3:.3f} ({alone / predicted - 1:+.1%}), inside a step "
            f"{inside / 1e3:.3f} ({inside / predicted - 1:+.1%})"
        )
        ranges = ", ".join(f"{name} {us / 1e3:.3f}" for name, us in row["ranges_us"].items() if not name[0].isdigit())
        print_more(f"inside, ms on the slowest rank: {ranges}")


def print_more(text: str) -> None:
    print(f"{'':<13} {text}", flush=True)


def between(figures_us: Sequence[float]) -> str:
    """From the least to the most, and how far apart."""
    least, most = min(figures_us), max(figures_us)
    return f"{least / 1e3:.2f} to {most / 1e3:.2f} ({most / least - 1:.1%})"


def print_head(world: World, device: torch.device, date: str, options: argparse.Namespace) -> None:
    found = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    recomputed = ", ".join(preset for preset in options.preset if recomputes(preset, options)) or "none"
    layers = counted(options.layers, "layer") if options.layers else "all layers"
    print(f"{world.size} x {fingerprint(str(device)).name}, {found}, {date}")
    print(
        f"{options.batch} x {counted(options.sequence, 'token')} a rank, {layers}, {counted(options.steps, 'step')}, "
        f"blocks recomputed in the backward: {recomputed}, blocks compiled: {'yes' if options.compile else 'no'}, "
        f"plain Newton-Schulz in bf16, {options.coefficients}{', learning rates of 0' if options.still else ''}"
    )
    print_line("preset", "optimizer", [name for name, _, _ in COLUMNS])


def compare(world: World, device: torch.device, options: argparse.Namespace) -> None:
    """Every variant on every preset, which the first rank prints preset by preset; it writes all so far each time."""
    setting = Setting(coefficient_set(options.coefficients), options.profile, options.bucket_bytes, options.still)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    if world.rank == 0:
        print_head(world, device, date, options)
    rows: list[Row] = []
    for preset in options.preset:
        before = rows
        for found in passes_of(world, device, preset, setting, options):
            rows = before + found
            if world.rank == 0 and options.json:
                options.json.write_text(json.dumps({
                    "date": date, "hardware": fingerprint(str(device)).to_dict(), "versions": versions(),
                    "ranks": world.size, "batch": options.batch, "sequence": options.sequence,
                    "coefficients": options.coefficients, "seed": options.seed, "compile": options.compile,
                    "profile": options.profile, "bucket_bytes": options.bucket_bytes, "repeat": options.repeat,
                    "still": options.still,
                    "recomputed": [preset for preset in options.preset if recomputes(preset, options)],
                    "rows": rows,
                }, indent=1))
        if world.rank == 0:
            for row in rows[len(before) :]:
                print_row(row)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """UsageError for what cannot be asked."""
    parser = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["qwen2.5-1.5b"], help=f"some of {' '.join(trainable())} "
                        "(default: qwen2.5-1.5b)")
    parser.add_argument("--variants", type=names(VARIANTS), default=tuple(key for key in VARIANTS if key != EARLY),
                        help=f"some of {','.join(VARIANTS)} (default: all but the last)")
    parser.add_argument("--layers", type=positive, help="of the model (default: the preset's)")
    parser.add_argument("--batch", type=positive, default=16, help="sequences a rank (default: 16)")
    parser.add_argument("--sequence", type=positive, default=2048, help="tokens of each (default: 2048)")
    parser.add_argument("--steps", type=positive, default=20, help="that are timed, by phase and again in a row "
                        "(default: 20)")
    parser.add_argument("--repeat", type=positive, default=2, metavar="N", help="passes over the variants, in turn "
                        "forward and backward (default: 2)")
    parser.add_argument("--device", default="auto", help="cuda, a GPU for each rank, or cpu (default: cuda if there)")
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, help="recompute blocks in the backward "
                        f"(default: from {RECOMPUTED_PARAMETERS / 1e9:.0f}e9 parameters on)")
    parser.add_argument("--compile", action="store_true", help="blocks by torch.compile")
    parser.add_argument("--profile", action="store_true", help="ours: owners by times of the model's own shapes, taken "
                        "before the first step")
    parser.add_argument("--bucket-bytes", type=positive, default=BUCKET_BYTES, metavar="N", help="ours: of one owner's "
                        f"batch in one round (default: {BUCKET_BYTES})")
    parser.add_argument("--still", action="store_true", help="learning rates of 0: every variant computes on the same "
                        "numbers")
    parser.add_argument("--coefficients", default="you", help="coefficient set (default: you)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="existing; gets a trace of two more steps of "
                        "each variant and rank, from which the share of communication beside computation is taken")
    parser.add_argument("--json", type=Path, help="write every figure here, after each variant")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        raise UsageError("--steps 1 has no spread; give 2 or more")
    coefficient_set(options.coefficients)
    if options.trace and not options.trace.is_dir():
        raise UsageError(f"--trace {options.trace}: name an existing folder")
    for preset in options.preset:
        numbers_of(preset, options.layers)
    return options


def main(arguments: Sequence[str]) -> int:
    if "RANK" not in os.environ:
        options_of(arguments)
        raise UsageError(f"start it on several processes: torchrun --nproc-per-node 2 tools/{PROGRAM}.py")
    world = World.joined()
    try:
        options = options_of(arguments)
        if world.rank == 0:
            check_writable("--json", options.json)
        compare(world, world.start(options.device), options)
        world.settle()
    except Exception as error:
        if world.first_to_fail():
            raise
        return outcome(error)[0]  # another rank says why
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = run(f"{PROGRAM}: rank {os.environ['RANK']}" if "RANK" in os.environ else PROGRAM, main)
    if code:
        os._exit(code)  # an ordinary exit may wait for what other ranks never join; torchrun ends those

"""Times whole optimizer steps on a model's matrices, ours and the peers': one run, one table.

    python tools/bench_step.py [--preset qwen2.5-1.5b] [--steps 500] [--json out.json]

Weights and gradients are bf16, momentum 0.95 with Nesterov, five steps of Newton–Schulz, and moonlight's scale.
``step`` is the wall-clock time a step in a row of steps that is waited for at its end, ``host`` the time until a step
returns, the device idle before it: medians over windows of all entrants in random order. ``state`` is what an optimizer
keeps, ``peak`` what its step has beside weights and gradients at most; ``off`` is the first step's Frobenius distance
from the same step in float64, over that step's norm (``--errors N``: on N matrices of each shape). Below the table: our
step by phase, and the memory over ``--steps`` steps. Run ``dmuon-tune tune --preset ...`` first.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from _bench_methods import PEER_VERSION, RESTARTS, STEPS, Refused, plain_ns, recurrence
from _bench_timing import host_us, ranges_us, row_us, spread, synchronize
from _runner import Parser, check_writable, run
from bench_ns import guarded, names, versions
from torch import Tensor, nn

from dmuon_tune.backends.probe import fingerprint, resolve
from dmuon_tune.cli.options import positive
from dmuon_tune.coefficients import CoefficientSet, coefficient_set
from dmuon_tune.matrices import select
from dmuon_tune.models import presets
from dmuon_tune.recipe import default_dtype
from dmuon_tune.runtime import Muon
from dmuon_tune.runtime.scales import SCALES
from dmuon_tune.words import counted, table

LR, MOMENTUM, SCALE = 1e-2, 0.95, "moonlight"
WINDOW_S, ROUNDS, LEAST_ROUNDS = 0.2, 12, 4  # p20 of fewer would be no window's
HOST_STEPS = 5  # a round
WARM_UP = 4  # the first compiles, the second captures, and what allocates does so by then
PHASES = ("check", "group", "momentum", "chain", "update", "AdamW")

Step = Callable[[], Any]


@dataclass
class Setting:
    """What every entrant gets: gradients by matrix, the coefficients and the chain's dtype."""

    gradients: list[Tensor]
    coefficients: CoefficientSet
    dtype: str


@dataclass
class Entrant:
    """One optimizer on weights of its own, which begin at zero: after one step they are its update."""

    label: str
    weights: list[nn.Parameter]
    optimizer: Any
    result: dict[str, Any] = field(default_factory=dict)


class PlainMuon:
    """Muon as one writes it with batches and the vendor library: foreach momentum, plain Newton–Schulz by shape."""

    def __init__(self, weights: list[nn.Parameter], setting: Setting) -> None:
        self.setting = setting
        self.by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for weight in weights:
            self.by_shape[weight.shape].append(weight)
        self.momenta = {shape: [torch.zeros_like(p) for p in some] for shape, some in self.by_shape.items()}

    @torch.no_grad()
    def step(self) -> None:
        dtype: torch.dtype = getattr(torch, self.setting.dtype)
        for shape, weights in self.by_shape.items():
            gradients, momenta = [p.grad for p in weights], self.momenta[shape]
            torch._foreach_mul_(momenta, MOMENTUM)
            torch._foreach_add_(momenta, gradients)
            u = torch.stack(torch._foreach_add(gradients, momenta, alpha=MOMENTUM))
            polars = plain_ns(u, self.setting.coefficients, dtype).to(u.dtype)
            torch._foreach_add_(weights, polars.unbind(), alpha=-LR * SCALES[SCALE](*shape))


def ours(weights: list[nn.Parameter], setting: Setting) -> Muon:
    return Muon(weights, lr=LR, momentum=MOMENTUM, scale=SCALE, coefficients=setting.coefficients, steps=STEPS,
                restarts=RESTARTS, ns_dtype=setting.dtype)


def adamw(weights: list[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=LR, fused=True)


def torch_muon(weights: list[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
    """It takes one triple for all steps: the last; what a step costs does not depend on it."""
    return torch.optim.Muon(weights, lr=LR, momentum=MOMENTUM, weight_decay=0.0, adjust_lr_fn="match_rms_adamw",
                            ns_steps=STEPS, ns_coefficients=setting.coefficients.take(STEPS)[-1])


def peer(weights: list[nn.Parameter], setting: Setting) -> Any:
    """gram-newton-schulz's Muon, its options mapped to ours."""
    try:
        found = version("gram-newton-schulz")
    except PackageNotFoundError:
        raise Refused(f"not installed; pip install gram-newton-schulz=={PEER_VERSION} (extra [bench])") from None
    if weights[0].device.type != "cuda":
        raise Refused(f"gram-newton-schulz {found} runs its kernels on a GPU alone")
    from gram_newton_schulz import Muon as Peer

    factor = setting.coefficients.norm_factor
    (a, b, c), *rest = setting.coefficients.take(STEPS)
    return Peer([{"params": weights}], lr=LR, weight_decay=0.0, momentum=MOMENTUM, adjust_lr="rms_norm",
                ns_coefficients=[[a / factor, b / factor**3, c / factor**5], *map(list, rest)],
                gram_newton_schulz_restart_iterations=list(RESTARTS))


def entrants() -> dict[str, tuple[str, Callable[[list[nn.Parameter], Setting], Any]]]:
    """Key → (label, maker of the optimizer)."""
    return {
        "ours": ("ours", ours), "adamw": ("AdamW, fused", adamw), "plain": ("plain NS, batched", PlainMuon),
        "torch": ("torch.optim.Muon", torch_muon), "peer": ("gram-newton-schulz", peer),
    }


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def prepare(entrant: Entrant, make: Callable[[list[nn.Parameter], Setting], Any], setting: Setting) -> None:
    """Make the optimizer, run it warm, and note its memory and its first update."""
    device = setting.gradients[0].device
    before = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    entrant.optimizer = make(entrant.weights, setting)
    entrant.optimizer.step()
    entrant.result["first"] = [weight.detach().to("cpu", copy=True) for weight in entrant.weights]
    for _ in range(WARM_UP - 1):
        entrant.optimizer.step()
    synchronize()
    if device.type == "cuda":
        entrant.result["state_bytes"] = allocated(device) - before
        entrant.result["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before


def measure(running: Sequence[Entrant], rounds: int) -> None:
    """Windows of all in random order, so that drift hits them alike."""
    calls = {id(e): max(1, int(WINDOW_S * 1e6 / row_us(e.optimizer.step, 2))) for e in running}
    walls: dict[int, list[float]] = defaultdict(list)
    hosts: dict[int, list[float]] = defaultdict(list)
    for _ in range(max(rounds, LEAST_ROUNDS)):
        for entrant in random.sample(list(running), len(running)):
            walls[id(entrant)].append(row_us(entrant.optimizer.step, calls[id(entrant)]))
            hosts[id(entrant)] += [host_us(entrant.optimizer.step) for _ in range(HOST_STEPS)]
    for entrant in running:
        entrant.result |= spread(walls[id(entrant)]) | {"host_us": statistics.median(hosts[id(entrant)])}


def phases_us(step: Step, device: torch.device, steps: int = 10) -> dict[str, float]:
    """Phase → microseconds a step on the device's own clock (the host's, on a CPU)."""
    return {name: us for name, us in ranges_us(step, device, steps).items() if name in PHASES}


def memory_over(step: Step, device: torch.device, steps: int) -> dict[str, int]:
    """Bytes allocated and reserved before and after so many steps."""
    def state() -> tuple[int, int]:
        synchronize()
        return allocated(device), torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

    before = state()
    for _ in range(steps):
        step()
    after = state()
    fields = ("allocated_before", "reserved_before", "allocated_after", "reserved_after")
    return {"steps": steps, **dict(zip(fields, before + after, strict=True))}


def off(entrant: Entrant, setting: Setting, most: int) -> float:
    """Relative distance of the first update from a float64 one, over ``most`` matrices of each shape."""
    seen: Counter[torch.Size] = Counter()
    wrong = right = 0.0
    for update, gradient in zip(entrant.result["first"], setting.gradients, strict=True):
        seen[update.shape] += 1
        if seen[update.shape] > most:
            continue
        want = -LR * SCALES[SCALE](*update.shape) * recurrence(gradient[None], setting.coefficients)[0]
        wrong += float((update.to(want.device).double() - want).square().sum())
        right += float(want.square().sum())
    return (wrong / right) ** 0.5


def shapes_of(preset: str) -> list[tuple[int, int]]:
    return select(presets.load(preset).parameters).shapes()


def make_gradients(shapes: Sequence[tuple[int, int]], device: torch.device, seed: int) -> list[Tensor]:
    rng = torch.Generator(device=device).manual_seed(seed)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, generator=rng) for shape in shapes]


def run_entrants(options: argparse.Namespace, setting: Setting) -> list[Entrant]:
    """Every entrant measured; those that cannot run have ``failed``."""
    found: list[Entrant] = []
    for key in options.entrants:
        label, make = entrants()[key]
        entrant = Entrant(label, [nn.Parameter(torch.zeros_like(g)) for g in setting.gradients], None)
        for weight, gradient in zip(entrant.weights, setting.gradients, strict=True):
            weight.grad = gradient
        found.append(entrant)
        with guarded(entrant.result, "failed"):
            prepare(entrant, make, setting)
            if options.errors and key not in ("adamw", "torch"):  # whose updates are others'
                entrant.result["off"] = off(entrant, setting, options.errors)
        if "failed" in entrant.result:
            entrant.optimizer, entrant.weights = None, []
            gc.collect()
        entrant.result.pop("first", None)
    measure([entrant for entrant in found if "failed" not in entrant.result], options.rounds)
    return found


def print_table(found: Sequence[Entrant]) -> None:
    def gigabytes(result: dict[str, Any], name: str) -> float | None:
        return round(result[name] / 1e9, 3) if name in result else None

    rows: list[list[Any]] = []
    for entrant in found:
        r = entrant.result
        if "failed" in r:
            rows.append([entrant.label, *[None] * 7, r["failed"]])
            continue
        times = [round(r[name] / 1e3, 3) for name in ("median_us", "p20_us", "p80_us", "host_us")]
        error = f"{r['off']:.2e}" if "off" in r else None
        rows.append([entrant.label, *times, gigabytes(r, "state_bytes"), gigabytes(r, "peak_bytes"), error, ""])
    print(table(["optimizer", "step_ms", "p20", "p80", "host_ms", "state_GB", "peak_GB", "off", ""], rows), flush=True)


def compare(options: argparse.Namespace) -> int:
    check_writable("--json", options.json)
    device = torch.empty(0, device=resolve("auto")).device
    shapes = shapes_of(options.preset)
    dtype = options.dtype or default_dtype(device.type)
    setting = Setting(make_gradients(shapes, device, options.seed), coefficient_set(options.coefficients), dtype)
    hardware, date = fingerprint(str(device)), datetime.now(UTC).isoformat(timespec="seconds")
    counts = ", ".join(f"{count}x{rows}x{cols}" for (rows, cols), count in Counter(shapes).items())
    elements = sum(rows * cols for rows, cols in shapes)
    print(f"{hardware.name}, torch {torch.__version__}, {options.preset}: {counts}, {elements / 1e9:.3f}e9 elements, "
          f"chain {dtype}, {options.coefficients}, {date}")
    found = run_entrants(options, setting)
    print_table(found)
    result: dict[str, Any] = {}
    mine = next((e for e in found if isinstance(e.optimizer, Muon)), None)
    if mine is not None:
        result = details(mine, found, device, options.steps)
    if options.json:
        options.json.write_text(json.dumps({
            "date": date, "hardware": hardware.to_dict(), "versions": versions(), "preset": options.preset,
            "dtype": dtype, "coefficients": options.coefficients, "ours": result,
            "rows": [{"optimizer": entrant.label, **entrant.result} for entrant in found],
        }, indent=1))
    return 0 if mine is not None or "ours" not in options.entrants else 1


def details(mine: Entrant, found: Sequence[Entrant], device: torch.device, steps: int) -> dict[str, Any]:
    """Our step by phase, what it runs on, and its memory over many steps, printed and returned."""
    step_us = mine.result["median_us"]
    split = phases_us(mine.optimizer.step, device)
    print("phases, ms: " + ", ".join(f"{name} {us / 1e3:.3f}" for name, us in split.items())
          + f"; host {mine.result['host_us'] / 1e3:.3f}")
    runs = Counter((row.batch, row.recipe, row.origin) for row in mine.optimizer.report().matrices)
    for (batch, recipe, origin), count in runs.items():
        print(f"{batch}: {recipe}, {origin}; {counted(count, 'matrix', 'matrices')}")
    others = {e.label: e.result["median_us"] for e in found if e is not mine and "median_us" in e.result}
    muons = {label: us for label, us in others.items() if not label.startswith("AdamW")}
    speedup = None
    if muons:
        fastest = min(muons, key=lambda label: muons[label])
        speedup = muons[fastest] / step_us
        print(f"{speedup:.2f}x the fastest other Muon ({fastest})")
    memory = memory_over(mine.optimizer.step, device, steps)
    print(f"memory over {counted(steps, 'step')}: bytes allocated {memory['allocated_before']} -> "
          f"{memory['allocated_after']}, reserved {memory['reserved_before']} -> {memory['reserved_after']}")
    found_runs = [[*run, count] for run, count in runs.items()]
    return {"phases_us": split, "runs": found_runs, "speedup": speedup, "memory": memory}


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="bench_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="qwen2.5-1.5b", help="the model's matrices (default: qwen2.5-1.5b)")
    parser.add_argument("--entrants", type=names(entrants()), default=tuple(entrants()),
                        help=f"some of {','.join(entrants())}")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help=f"windows of each, at least {LEAST_ROUNDS} "
                        f"(default: {ROUNDS})")
    parser.add_argument("--steps", type=positive, default=500, help="of the memory's check (default: 500)")
    parser.add_argument("--errors", type=int, default=1, metavar="N",
                        help="matrices of each shape that are compared with float64, 0 for none (default: 1)")
    parser.add_argument("--coefficients", default="you", help="coefficient set (default: you)")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="the chain's (default: by device)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every figure here")
    return compare(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(run("bench_step", main))

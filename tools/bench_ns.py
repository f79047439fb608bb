"""Times and checks whole Newton–Schulz chains: tuned, plain and Gram on the vendor library, in one run and one table.

    python tools/bench_ns.py --shapes 1x4096x4096,1x1024x4096,8x2048x5464 [--dtype float16] [--json out.json]

GPU time is that of a CUDA-graph replay, median with p20 and p80 over interleaved windows. Errors are Frobenius norms
relative to the float64 polar factor and to the same recurrence in float64.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dmuon_tune.backends.probe import fingerprint, resolve
from dmuon_tune.coefficients import CoefficientSet, coefficient_set
from dmuon_tune.models.shape_text import parse as parse_shapes
from dmuon_tune.problem import DTYPES
from dmuon_tune.recipe import Group, default_dtype
from dmuon_tune.runtime import GramNewtonSchulz

STEPS, RESTARTS = 5, (2,)
WINDOWS = 15


def normalized(u: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """U/(factor·‖U‖_F) by matrix, divided in fp32 (float64 for float64), as a wide matrix."""
    wide = u if u.shape[-2] <= u.shape[-1] else u.mT
    precise = wide.double() if dtype == torch.float64 else wide.float()
    return (precise / (torch.linalg.matrix_norm(precise, keepdim=True) * factor + 1e-7)).to(dtype)


def plain_ns(u: Tensor, coefficients: CoefficientSet, dtype: torch.dtype) -> Tensor:
    """X ← aX + (bA + cA²)X with A = XXᵀ, by torch.baddbmm."""
    steps = coefficients.take(STEPS)
    x = normalized(u, dtype, coefficients.norm_factor)
    for a, b, c in steps:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if u.shape[-2] <= u.shape[-1] else x.mT


def gram_ns(u: Tensor, coefficients: CoefficientSet, dtype: torch.dtype) -> Tensor:
    """The Gram form with a restart, by torch.baddbmm: full products, no symmetry."""
    steps = coefficients.take(STEPS)
    x = normalized(u, dtype, coefficients.norm_factor)
    gram = q = None
    for step, (a, b, c) in enumerate(steps):
        if step in (0, *RESTARTS):
            x = x if q is None else torch.bmm(q, x)
            gram, q = torch.bmm(x, x.mT), None
        assert gram is not None
        z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if q is None:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = torch.baddbmm(q, q, z, beta=a)
        if step + 1 < len(steps) and step + 1 not in RESTARTS:
            moved = torch.baddbmm(gram, gram, z, beta=a)
            gram = torch.baddbmm(moved, moved, z, beta=a)
    x = torch.bmm(q, x)
    return x if u.shape[-2] <= u.shape[-1] else x.mT


def polar(u: Tensor) -> Tensor:
    """The polar factor in float64 by an eigendecomposition of the short side's Gram matrix."""
    wide = u.double() if u.shape[-2] <= u.shape[-1] else u.double().mT
    values, vectors = torch.linalg.eigh(wide @ wide.mT)
    factor = (vectors * values.clamp_min(1e-300).rsqrt()[..., None, :]) @ vectors.mT @ wide
    return factor if u.shape[-2] <= u.shape[-1] else factor.mT


def relative(out: Tensor, reference: Tensor) -> float:
    return float(torch.linalg.vector_norm(out.double() - reference) / torch.linalg.vector_norm(reference))


def graph_of(function: Callable[[], object]) -> Callable[[], None]:
    """A replay of the captured call on a GPU; the call itself on a CPU."""
    if not torch.cuda.is_available():
        return lambda: (function(), None)[1]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        function()
    return graph.replay


def window_us(replay: Callable[[], None], repeats: int) -> float:
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(repeats):
            replay()
        return (time.perf_counter() - begin) / repeats * 1e6
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats * 1e3


def bench(
    group: Group, dtype: str, device: str, coefficients: CoefficientSet, seed: int
) -> dict[str, dict[str, float]]:
    """Method → median, p20, p80 in microseconds for the whole batch, and errors."""
    rng = torch.Generator(device=device).manual_seed(seed)
    u = torch.randn(group.batch, group.rows, group.cols, device=device, generator=rng).bfloat16()
    arithmetic = getattr(torch, dtype)
    tuned = GramNewtonSchulz(coefficients=coefficients, steps=STEPS, restarts=RESTARTS, dtype=dtype)
    methods: dict[str, Callable[[], Tensor]] = {
        "tuned": lambda: tuned(u),
        "gram NS, library": lambda: gram_ns(u, coefficients, arithmetic).to(u.dtype),
        "plain NS, library": lambda: plain_ns(u, coefficients, arithmetic).to(u.dtype),
    }
    exact, recurrence = polar(u), plain_ns(u, coefficients, torch.float64)
    results = {}
    replays = {}
    for name, method in methods.items():
        out = method()
        results[name] = {"polar_err": relative(out, exact), "recurrence_err": relative(out, recurrence)}
        replays[name] = graph_of(method)
    del exact, recurrence
    repeats = {name: max(1, int(2e4 / max(window_us(replay, 2), 1.0))) for name, replay in replays.items()}
    windows: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(WINDOWS):
        for name in random.sample(list(methods), len(methods)):
            windows[name].append(window_us(replays[name], repeats[name]))
    for name, samples in windows.items():
        p20, *_, p80 = statistics.quantiles(samples, n=5)
        results[name] |= {"median_us": statistics.median(samples), "p20_us": p20, "p80_us": p80}
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="1x4096x4096,1x1024x4096,8x2048x5464", help="BxROWSxCOLS, comma-separated")
    parser.add_argument("--dtype", choices=DTYPES, help="the chain's arithmetic (default: by device)")
    parser.add_argument("--coefficients", default="you", help="coefficient set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    device = resolve("auto")
    dtype = options.dtype or default_dtype(fingerprint(device).kind)
    rows = {}
    header = ("shape", "method", "median us", "p20", "p80", "speed-up", "polar err", "recurrence err")
    print(f"{fingerprint(device).name}, torch {torch.__version__}, {dtype}, {options.coefficients}, bf16 in and out")
    print("{:>16} {:<18} {:>10} {:>9} {:>9} {:>8} {:>10} {:>14}".format(*header))
    for group in parse_shapes(options.shapes):
        rows[group.label()] = results = bench(group, dtype, device, coefficient_set(options.coefficients), options.seed)
        base = results["gram NS, library"]["median_us"]
        for name, r in results.items():
            print(
                f"{group.label():>16} {name:<18} {r['median_us']:10.1f} {r['p20_us']:9.1f} {r['p80_us']:9.1f} "
                f"{base / r['median_us']:8.2f} {r['polar_err']:10.4f} {r['recurrence_err']:14.5f}"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times and checks whole Newton–Schulz chains, ours and the peers', on many shapes: one run, one table.

    python tools/bench_ns.py [--shapes 1x4096x4096,64x256x256] [--unseen] [--json out.json]

Input and output are bf16, five steps, one restart before the third in the Gram form. ``graph`` is the GPU time of a
call in a CUDA graph of calls that take 1 ms, on the chain's own (warm) buffers: median, p20 and p80 over windows of all
methods in random order.
``wall`` is an eager call in a row of calls, ``host`` the time until an eager call returns. ``xlimit`` divides the graph
time by that of the chain's FLOPs (symmetric products counted once) at the ceiling measured in the same run. Errors are
Frobenius norms relative to the polar factor and to the same recurrence in float64. Run ``dmuon-tune tune --shapes ...``
on the same shapes first; another project's kernels that it may have kept are left out unless ``--no-own-only``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _bench_methods import (
    INPUTS,
    Calls,
    OwnLayers,
    Refused,
    Setting,
    make_input,
    methods,
    polar,
    recurrence,
    relative,
)
from _bench_processes import PREPARE_S, READY, LeftOut, Row, side_by_side
from _bench_timing import Replay, ceiling_flops, eager, graph_of, interleaved
from _runner import Parser, check_writable, run

import dmuon_tune
from dmuon_tune.backends.probe import fingerprint, resolve
from dmuon_tune.cache import Layers
from dmuon_tune.cli.options import positive, seconds
from dmuon_tune.coefficients import coefficient_set
from dmuon_tune.errors import said
from dmuon_tune.models.shape_text import parse as parse_shapes
from dmuon_tune.problem import DTYPES
from dmuon_tune.recipe import Group, default_dtype
from dmuon_tune.search.provenance import driver_version

SHAPES = (
    "1x1024x1024,1x1024x4096,1x2048x2048,1x2048x8192,1x3584x18944,1x4096x4096,1x4096x14336,1x8192x8192,1x8192x28672,"
    "16x1024x4096,64x256x256,64x128x128,32x512x512,24x768x3072,8x2048x5464"
)
UNSEEN = "1x1536x8960,6x640x2560,40x384x1152,1x5120x5120,3x1152x4304,12x256x1024"
PACKAGES = (
    "torch", "triton", "nvidia-cutlass-dsl", "tilelang", "apache-tvm-ffi", "gram-newton-schulz", "quack-kernels",
)
METHODS = ("tuned", "untuned", "plain", "gram", "compiled", "peer")  # Dion's takes minutes more
WORKERS = 6  # on a GPU: compilers keep the host busy much longer than all timings take
POLAR_MAX_M = 4096  # a float64 eigendecomposition takes 10 s and more above
OURS = ("tuned", "untuned")
COLUMNS = "{:>14} {:<23}" + " {:>9}" * 3 + " {:>9} {:>8} {:>7} {:>10} {:>10}"
HEADER = ("shape", "method", "graph_us", "p20", "p80", "wall_us", "host_us", "xlimit", "polar_err", "recur_err")


def chain_flops(group: Group) -> int:
    """Five steps with one restart, symmetric products counted once: 6·m²n + 14·m³ a matrix (m = n: 20·m³)."""
    return group.batch * (6 * group.m**2 * group.n + 14 * group.m**3)


class Bench:
    """One shape: what each method is, how far from float64, and how long.

    ``left_out`` says of methods that must not be tried again why; ``begins`` is called with a method's key before
    whatever of it may hang, and with none before what is no method's.
    """

    def __init__(
        self, group: Group, setting: Setting, options: argparse.Namespace, left_out: Mapping[str, str] | None = None,
        begins: Callable[[str], Any] = lambda key: None,
    ) -> None:
        self.group, self.setting, self.options = group, setting, options
        self.left_out, self.begins = left_out or {}, begins
        self.device = torch.empty(0, device=resolve("auto")).device
        self.u = make_input("gaussian", group, self.device, options.seed).bfloat16()
        self.calls: dict[str, Calls] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.unchecked: dict[str, str] = {}  # kind of input → why there is no float64 reference

    @torch.no_grad()  # all along: torch.compile compiles anew where the mode changes
    def prepare(self) -> None:
        """Compile and check every method: ``results`` then has each one's label, and ``failed`` where it cannot run."""
        makers = methods("cuBLAS" if self.device.type == "cuda" else "BLAS")
        for key in self.options.methods:
            label, make = makers[key]
            self.results[key] = {"label": label}
            if key in self.left_out:
                self.results[key]["failed"] = self.left_out[key]
                continue
            self.begins(key)
            with guarded(self.results[key], "failed"):
                calls = make(self.setting, self.group, self.device)
                calls.captured(self.u)
                self.results[key] |= {"note": calls.note, "kernels": list(calls.kernels)}
                self.calls[key] = calls
        if self.device.type == "cuda":
            for key, calls in self.calls.items():
                self.begins(key)
                with guarded(self.results[key], "eager_failed"):
                    calls.eager(self.u)
        self.begins("")
        if self.options.errors:
            for kind in self.options.inputs:
                with guarded(self.unchecked, kind):
                    self._errors(kind)

    def _errors(self, kind: str) -> None:
        u = self.u if kind == "gaussian" else make_input(kind, self.group, self.device, self.options.seed + 1)
        references = {"recurrence_err": recurrence(u, self.setting.coefficients)}
        if self.group.m <= self.options.polar_max:
            references["polar_err"] = polar(u)
        for key, calls in self.calls.items():
            self.begins(key)
            with guarded(self.results[key], f"{kind}_failed"):
                out = calls.captured(u)
                found = {name: relative(out, reference) for name, reference in references.items()}
                self.results[key].setdefault("errors", {})[kind] = found
        self.begins("")

    @torch.no_grad()
    def time(self) -> None:
        """Add the times; ``graph_failed``, ``eager_failed`` say why some are missing."""
        u = self.u
        replays: dict[str, Replay] = {}
        for key, calls in self.calls.items():
            with guarded(self.results[key], "graph_failed"):
                replays[key] = graph_of(lambda call=calls.captured: call(u))
        for key, figures in interleaved(replays).items():
            self.results[key] |= figures
        replays.clear()
        if self.device.type == "cuda":
            for key, calls in self.calls.items():
                if "eager_failed" in self.results[key]:
                    continue
                with guarded(self.results[key], "eager_failed"):
                    self.results[key] |= eager(lambda call=calls.eager: call(u))


@contextmanager
def guarded(result: dict[str, Any], field: str) -> Iterator[None]:
    """Writes what its block raises into ``result[field]``; the run goes on."""
    try:
        yield
    except Exception as error:  # another project's code may raise anything
        result[field] = str(error) if isinstance(error, Refused) else said(error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def print_rows(group: Group, results: dict[str, dict[str, Any]], limit_us: float) -> None:
    for r in results.values():
        if "failed" in r:
            print(f"{group.label():>14} {r['label']:<23} {r['failed']}", flush=True)
            continue
        errors = r.get("errors", {}).get("gaussian", {})
        median_us = r.get("median_us")
        print(COLUMNS.format(
            group.label(), r["label"], *(digits(r.get(name), 1) for name in ("median_us", "p20_us", "p80_us")),
            digits(r.get("wall_median_us"), 1), digits(r.get("host_us"), 1),
            digits(median_us / limit_us if median_us else None, 2),
            digits(errors.get("polar_err"), 5), digits(errors.get("recurrence_err"), 6),
        ), flush=True)
        for field in sorted(name for name in r if name.endswith("_failed")):
            print(f"{'':>14} {field.replace('_', ' ')}: {r[field]}")
    notes = [f"{r['label']}: {r['note']}" for key, r in results.items() if r.get("note") and key in OURS]
    if notes:
        print(f"{'':>14} {' | '.join(notes)}", flush=True)


def digits(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def print_errors(rows: list[dict[str, Any]], kinds: Iterable[str]) -> None:
    print("\npolar_err / recur_err by input (fp32):")
    for row in rows:
        for r in row["methods"].values():
            cells = [
                f"{kind} {digits(found.get('polar_err'), 5)} / {digits(found.get('recurrence_err'), 6)}"
                for kind in kinds if (found := r.get("errors", {}).get(kind))
            ]
            print(f"{row['shape']:>14} {r['label']:<23} {'   '.join(cells)}")


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """Ours against the fastest peer, our own defaults and the limit, by graph time; empty where ours has none."""
    times = {key: r["median_us"] for key, r in row["methods"].items() if "median_us" in r}
    if "tuned" not in times:
        return {}
    ours_us = times["tuned"]
    found = {"ours_us": ours_us, "over_limit": ours_us / row["limit_us"]}
    peers = {key: us for key, us in times.items() if key not in OURS}
    if peers:
        fastest = min(peers, key=lambda key: peers[key])
        found |= {
            "fastest_peer": row["methods"][fastest]["label"], "peer_us": peers[fastest],
            "speedup": peers[fastest] / ours_us,
        }
    if "untuned" in times:
        found["over_untuned"] = times["untuned"] / ours_us
    return found


def print_summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Prints a line a shape; returns the geometric means."""
    line = "{:>14} {:>10} {:>7} {:<23} {:>10} {:>9} {:>13}"
    print("\n" + line.format("shape", "ours_us", "xlimit", "fastest peer", "peer_us", "speed-up", "over untuned"))
    for row in rows:
        s = row["summary"]
        print(line.format(
            row["shape"], digits(s.get("ours_us"), 1), digits(s.get("over_limit"), 2), s.get("fastest_peer", "-"),
            digits(s.get("peer_us"), 1), digits(s.get("speedup"), 2), digits(s.get("over_untuned"), 2),
        ))
    means = {}
    for name in ("speedup", "over_untuned", "over_limit"):
        values = [row["summary"][name] for row in rows if name in row["summary"]]
        if values:
            means[name] = math.exp(sum(map(math.log, values)) / len(values))
    print("geometric means: " + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in means.items()))
    return means


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "dmuon-tune": dmuon_tune.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    # A package's metadata has no "+cu130".
    return found | {"torch": torch.__version__, "cuda": torch.version.cuda or "", "driver": driver_version()}


def setting_of(options: argparse.Namespace) -> Setting:
    dtype = options.dtype or default_dtype(fingerprint(resolve("auto")).kind)
    return Setting(coefficient_set(options.coefficients), dtype, (OwnLayers if options.own_only else Layers).open())


def one_by_one(groups: list[Group], options: argparse.Namespace) -> Iterator[Row]:
    """Every shape prepared and timed in this process."""
    setting = setting_of(options)
    for group in groups:
        bench = Bench(group, setting, options)
        bench.prepare()
        bench.time()
        yield bench.results, bench.unchecked
        del bench  # and its buffers
        torch.compiler.reset()  # a function has few compiled versions before torch.compile gives up on it
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def serve(pipe: Connection, groups: list[Group], options: argparse.Namespace, left_out: LeftOut) -> None:
    """One of several processes: prepares its shapes, saying what it begins, and times one each time it is told to."""
    torch._dynamo.config.recompile_limit = 16 * len(groups)
    setting = setting_of(options)
    benches = [
        Bench(group, setting, options, left_out.get(index), lambda key, index=index: pipe.send((index, key)))
        for index, group in enumerate(groups)
    ]
    for bench in benches:
        bench.prepare()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    pipe.send(READY)
    for bench in benches:
        pipe.recv()
        bench.time()
        pipe.send((bench.results, bench.unchecked))


def compare(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    groups = parse_shapes(options.shapes + ("," + UNSEEN if options.unseen else ""))
    check_writable("--json", options.json)
    setting = setting_of(options)
    device = torch.device(resolve("auto"))
    found = fingerprint(device.type)
    ceiling = ceiling_flops(device, setting.arithmetic)
    options.workers = min(options.workers or (WORKERS if found.kind == "cuda" else 1), len(groups))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    print(f"{found.name}, torch {torch.__version__}, chain {setting.dtype}, {options.coefficients}, {date}")
    print(f"ceiling: {ceiling / 1e12:.1f} TFLOP/s")
    print(COLUMNS.format(*HEADER), flush=True)
    rows: list[dict[str, Any]] = []
    measured = side_by_side(groups, options, serve) if options.workers > 1 else one_by_one(groups, options)
    for group, (results, unchecked) in zip(groups, measured, strict=True):
        limit_us = chain_flops(group) / ceiling * 1e6
        print_rows(group, results, limit_us)
        for kind, reason in unchecked.items():
            print(f"{'':>14} {kind} inputs unchecked: {reason}")
        row: dict[str, Any] = {
            "shape": group.label(), "limit_us": limit_us, "methods": results, "unchecked": unchecked,
        }
        rows.append(row | {"summary": summary(row)})
    if options.errors and set(options.inputs) - {"gaussian"}:
        print_errors(rows, options.inputs)
    means = print_summary(rows)
    print(f"took {time.perf_counter() - started:.0f} s")
    if options.json:
        report = {
            "date": date, "hardware": found.to_dict(), "versions": versions(), "dtype": setting.dtype,
            "coefficients": options.coefficients, "seed": options.seed, "own_only": options.own_only,
            "ceiling_tflops": ceiling / 1e12, "geometric_means": means, "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if all(row["summary"] for row in rows) or "tuned" not in options.methods else 1


def names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """An argparse type: comma-separated names, each of them known."""
    listed = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in chosen:
            if name not in listed:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; choose among {', '.join(listed)}")
        return chosen

    return parse


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="bench_ns", description=(__doc__ or "").splitlines()[0])
    keys = tuple(methods(""))
    parser.add_argument("--shapes", default=SHAPES, help="BATCHxROWSxCOLS, comma-separated (default: 15 shapes)")
    parser.add_argument("--unseen", action="store_true", help=f"also {UNSEEN}")
    parser.add_argument("--methods", type=names(keys), default=METHODS,
                        help=f"some of {','.join(keys)} (default: all but dion)")
    parser.add_argument("--inputs", type=names(INPUTS), default=("gaussian",), help=f"some of {','.join(INPUTS)}")
    parser.add_argument("--errors", action=argparse.BooleanOptionalAction, default=True, help="compare with float64")
    parser.add_argument("--polar-max", type=int, default=POLAR_MAX_M, metavar="M", help="largest short side for the "
                        f"polar factor's error (default: {POLAR_MAX_M})")
    parser.add_argument("--own-only", action=argparse.BooleanOptionalAction, default=True,
                        help="tuned with our own kernels and the vendor library alone (default: yes)")
    parser.add_argument("--dtype", choices=DTYPES, help="the chain's arithmetic (default: by device)")
    parser.add_argument("--coefficients", default="you", help="coefficient set (default: you)")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes that compile and check shapes "
                        f"ahead of the timing (default: {WORKERS} on a GPU, 1 on a CPU)")
    parser.add_argument("--prepare-timeout", type=seconds, default=PREPARE_S, metavar="TIME", help="a method that one "
                        f"of several processes takes longer to prepare has failed (default: {PREPARE_S:.0f}s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every figure here")
    return compare(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(run("bench_ns", main))

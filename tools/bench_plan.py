"""Times what training does before its first step: a model's plan from a large cache, without compiling.

python tools/bench_plan.py --preset qwen2.5-7b --entries 10000

The cache holds what tuning the model keeps for one device model: every product of its chains by each kernel that
serves it, every group's recipe, and other shapes up to the asked number of entries. Each run is a fresh
process; what it imports is not counted. No GPU is needed.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median

from _runner import Parser, run

from dmuon_tune import recipe
from dmuon_tune.backends import CompiledKernel, backends
from dmuon_tune.cache import Contents, Layers, Store, Trial, keep
from dmuon_tune.cache.contents import KeptRecipe
from dmuon_tune.cli.options import positive
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.matrices import select
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.models import presets
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import DEFAULT_RESTARTS, DEFAULT_STEPS, Group, Pick
from dmuon_tune.runtime.plan import _plan_groups
from dmuon_tune.runtime.resolve import Resolver
from dmuon_tune.space import config_to_dict

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 140 * 2**30)
DTYPE = "float16"
CREATED = "2026-11-30T00:00:00+00:00"
RUNS = 5


def groups_of(preset: str) -> list[Group]:
    return list(dict.fromkeys(recipe.groups(select(presets.load(preset).parameters).shapes())))


def results_of(problem: Problem) -> Iterator[Trial]:
    """What a tuned cache holds of one problem: a result of every kernel that serves it."""
    for place, spec in enumerate(kernels(problem.op)):
        config = spec.untuned(problem, H200)
        if config is None or backends()[spec.backend].unavailable(H200):
            continue
        samples = [10.0 + place + 0.01 * each for each in range(30)]
        measurement = Measurement.from_samples(samples, 1e-3, {"registers": 168})
        key = tuning_key(spec, problem, H200)
        yield Trial(key, config_to_dict(config), measurement, "", {"tool": "bench_plan"}, CREATED)


def recipe_of(group: Group, results: Sequence[Trial]) -> KeptRecipe:
    """A group's chain by the fastest result of each product."""
    best = {result.key.problem: result for result in sorted(results, key=lambda each: -each.measurement.median_us)}
    chain = recipe.Recipe(group, "gram", DTYPE)
    picks = tuple(
        Pick(problem, best[problem].key.kernel, best[problem].config, best[problem].key.sha256)
        for problem in chain.products()
    )
    kept = replace(chain, cost_us=100.0, p20_us=99.0, p80_us=101.0, picks=picks)
    return KeptRecipe(H200, kept, CREATED)


def fill(path: Path, groups: Sequence[Group], entries: int) -> None:
    problems = list(dict.fromkeys(
        problem for group in groups for form in recipe.forms(group, DTYPE)
        for problem in recipe.chain(group, form, DTYPE)
    ))
    results = [result for problem in problems for result in results_of(problem)]
    templates = list(results)
    for number in count(1):
        if len(results) >= entries:
            break
        for template in templates[: entries - len(results)]:
            problem = replace(template.key.problem, n=template.key.problem.n + 8 * number)
            results.append(replace(template, key=replace(template.key, problem=problem)))
    with Store.open(path) as store:
        recipes = tuple(recipe_of(group, templates) for group in groups)
        keep(store, lambda nothing: Contents(tuple(results), recipes))


def timed_plan(path: Path, groups: Sequence[Group], profile: bool) -> dict[str, float]:
    """Milliseconds of one plan in this process, and how many of its products are tuned."""

    def build(*ignored: object) -> CompiledKernel:
        return CompiledKernel(lambda *arguments: None)

    backends(), kernels()  # which import their modules
    gc.collect()
    gc.freeze()  # else a collection of all that was imported, 100 ms, falls into some runs
    profiler = cProfile.Profile()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    if profile:
        profiler.enable()
    with Layers.open({"HOME": str(path.parent), "DMUON_TUNE_CACHE_PATH": str(path)}) as layers:
        resolver = Resolver(H200, layers, use_nearest=False, build=build)
        _plan_groups(groups, DTYPE, resolver, DEFAULT_STEPS, DEFAULT_RESTARTS)
    profiler.disable()
    took_ms, cpu_ms = 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - begin_cpu)
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(40)
    tuned = sum(bound.origin == "tuned" for bound in resolver.bound.values())
    return {"ms": took_ms, "cpu_ms": cpu_ms, "groups": len(groups), "products": len(resolver.bound), "tuned": tuned}


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="bench_plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen2.5-7b", choices=presets.names())
    parser.add_argument("--entries", type=positive, default=10_000)
    parser.add_argument("--cache", type=Path, help="this cache, as it is (one run, in this process)")
    parser.add_argument("--profile", action="store_true", help="where the time goes, on stderr")
    options = parser.parse_args(arguments)
    groups = groups_of(options.preset)
    if options.cache:
        print(json.dumps(timed_plan(options.cache, groups, options.profile)))
        return 0
    with tempfile.TemporaryDirectory(prefix="dmuon-tune-") as folder:
        path = Path(folder) / "cache.sqlite"
        fill(path, groups, options.entries)
        command = [sys.executable, __file__, "--preset", options.preset, "--cache", str(path)]
        runs = [json.loads(subprocess.check_output(command)) for _ in range(RUNS)]
        if options.profile:
            subprocess.run([*command, "--profile"], check=True, stdout=subprocess.DEVNULL)
    found = {"entries": options.entries, **runs[0]}
    found |= {name: median(run[name] for run in runs) for name in ("ms", "cpu_ms")}
    print(json.dumps({**found, "all_ms": [round(run["ms"], 1) for run in runs]}))
    return 0


if __name__ == "__main__":
    sys.exit(run("bench_plan", main))

"""Writes the cache that the package ships for one GPU model: its presets' winners, recipes and costs, tuned there.

    python tools/starter_cache.py --cache work.sqlite --devices 0,1 --budget 10m
    python tools/starter_cache.py --from work.sqlite owners.sqlite

The first tunes every preset, or those of --preset, into a cache file and goes on where it stopped; options that it does
not know are for 'dmuon-tune tune': --effort, --budget (of a preset), --devices, --world-size (the batches of so many
owners in place of the presets' own). The second writes what caches and bundles hold, without a GPU. What the package's
file holds for today's kernels stays where nothing better was measured; delete that file to begin anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from _runner import Parser, check_writable, note, run
from bench_plan import groups_of

from dmuon_tune import cli, starter
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Contents, TuningKey, database_bytes, merged
from dmuon_tune.cli.bundles import BUNDLE_OR_CACHE, opened_source
from dmuon_tune.cli.output import say, table, write_file
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.measure.verify import VALIDATION
from dmuon_tune.models import presets
from dmuon_tune.words import counted

LIMIT_BYTES = 5_000_000  # of what every wheel carries


def main(arguments: Sequence[str]) -> int:
    place, device = starter.h200()
    args, of_tune = options_of(arguments, place)
    if not args.sources:
        code = tune(args.preset or presets.names(), args.cache, of_tune, device)
        if code or "--dry-run" in of_tune:
            note(f"nothing was written: 'dmuon-tune tune' ended with exit code {code}", "starter_cache")
            return code
    sources = [*(args.sources or [args.cache]), *([str(place)] if place.exists() else [])]
    contents = gathered(sources, device)
    content = database_bytes(contents)
    if len(content) > LIMIT_BYTES:
        size = counted(len(content), "byte")
        raise UsageError(f"{size}: more than the {LIMIT_BYTES} that a package may ship; tune less")
    write_file(args.out, content)
    say(table(["preset", "groups", "with_recipe", "timed_chains", "other_batches"], rows_of(contents)))
    what = f"{counted(len(contents.results), 'result')}, {counted(len(contents.recipes), 'recipe')}"
    note(f"{args.out}: {what}, {counted(len(content), 'byte')}", "starter_cache")
    return 0


def options_of(arguments: Sequence[str], place: Path) -> tuple[argparse.Namespace, list[str]]:
    """This program's options, and those for ``dmuon-tune tune``."""
    parser = Parser(prog="starter_cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", metavar="NAME", choices=presets.names(), help="default: all")
    parser.add_argument("--cache", help="the file to tune into")
    parser.add_argument("--from", dest="sources", nargs="+", metavar="SOURCE", help=BUNDLE_OR_CACHE)
    parser.add_argument("--out", type=Path, default=place, help="default: the package's file")
    args, of_tune = parser.parse_known_args(arguments)
    if bool(args.sources) == bool(args.cache):
        raise UsageError("give --cache FILE to tune into, or --from SOURCE ... that are tuned")
    if args.sources and (args.preset or of_tune):
        raise UsageError(f"--from tunes nothing; leave out {'--preset' if args.preset else of_tune[0]}")
    check_writable("--out", args.out)
    return args, of_tune


def tune(names: Sequence[str], path: str, of_tune: Sequence[str], device: DeviceFingerprint) -> int:
    """The exit code of the first preset that failed, else 0."""
    here = fingerprint("auto")
    if here != device:
        raise UsageError(f"the file is for {device.name}, here is {here.name}; tune there, or give --from")
    for name in names:
        note(f"tuning {name}", "starter_cache")
        with redirect_stdout(sys.stderr):
            code = cli.main(["tune", "--preset", name, "--cache", path, *of_tune])
        if code:
            return code
    return 0


def gathered(sources: Sequence[str], device: DeviceFingerprint) -> Contents:
    """What training on ``device`` reads of these caches, as long as their kernels are today's."""
    with ExitStack() as stack:
        opened = [stack.enter_context(opened_source(source, is_given=True)) for source in sources]
        union = merged([source.contents.as_shipped() for source in opened])
    todays = {(spec.name, spec.digest(), VALIDATION) for spec in kernels()}
    kept = union.kept(lambda result: result.key.device == device and code_of(result.key) in todays)
    gone = len(union.results) - len(kept.results)
    if gone:
        note(f"{counted(gone, 'result')} left out: of other code than today's, or of another device", "starter_cache")
    of_device = tuple(each for each in kept.recipes if each.device == device)
    return replace(kept, recipes=of_device).only_winners().as_shipped()


def code_of(key: TuningKey) -> tuple[str, str, str]:
    return key.kernel, key.spec_digest, key.validation


def rows_of(contents: Contents) -> list[list[Any]]:
    """Of each preset: its groups, how many have a recipe and how many of those chains were timed, and the recipes of
    other batches of its matrices, such as owners run."""
    recipes = {kept.recipe.group: kept.recipe for kept in contents.recipes}
    rows = []
    for name in presets.names():
        groups = groups_of(name)
        own = [recipes[group] for group in groups if group in recipes]
        shapes = {(group.rows, group.cols) for group in groups}
        alike = sum((group.rows, group.cols) in shapes for group in recipes)
        rows.append([name, len(groups), len(own), sum(recipe.timed for recipe in own), alike - len(own)])
    return rows


if __name__ == "__main__":
    sys.exit(run("starter_cache", main))

"""``dmuon-tune cache verify``: checks and times kept results again on this device."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import UsageError
from dmuon_tune.words import counted

from . import options
from .bundles import BUNDLE_OR_CACHE, opened_source
from .output import config_text, microseconds, note, print_json, say, table

if TYPE_CHECKING:
    from dmuon_tune.cache import Trial
    from dmuon_tune.measurement import Measurement

SAMPLE = 16
SLOWER = 1.25  # times the kept median: more than what runs of one kernel differ by on a busy device
SEED = 1  # of the inputs: others than the tuner's


@dataclass(frozen=True)
class Rechecked:
    """A kept result, and how it ended now."""

    result: Trial
    now: Measurement

    @property
    def ratio(self) -> float | None:
        """The time now over the kept one."""
        kept_us, now_us = self.result.measurement.median_us, self.now.median_us
        return now_us / kept_us if kept_us and now_us else None

    @property
    def verdict(self) -> str:
        if not self.now.ok:
            return f"{self.now.status}: {self.now.reason}" if self.now.reason else self.now.status
        return "slower" if (self.ratio or 0.0) > SLOWER else "ok"


def register(actions: Any) -> None:
    parser = actions.add_parser(
        "verify", parents=[options.common(), options.cache()], help="check and time results again on this device",
        description="Check a sample of the winners of a bundle or cache, or all, on this device against float64, and "
        "time them. Those that pass need no check when training first compiles them; compiled kernels are checked when "
        "training first loads them, here by their digests alone. Exit code 1 where one fails; one that "
        f"takes more than {SLOWER:g} times as long as it did is told.",
    )
    parser.add_argument(
        "source", type=options.place, metavar="SOURCE", nargs="?",
        help=f"{BUNDLE_OR_CACHE} (default: the user's cache)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument("--all", action="store_true", help="every winner")
    parser.add_argument(
        "--sample", type=options.positive, default=SAMPLE, metavar="N", help=f"so many winners (default: {SAMPLE})"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.source is not None and args.cache is not None:
        raise UsageError(f"{args.source} and --cache {args.cache} both name what to verify; give one")
    from dmuon_tune.cache import Checked

    with opened_source(args.source or args.cache, is_given=args.source is not None) as source:
        damaged = source.artefacts.verify()
        winners = source.contents.winners
    here, skipped = _of_this_device(winners, args.device)
    chosen = here if args.all else _sample(here, args.sample)
    found = _recheck(chosen, args.device)
    checked = Checked()
    for each in found:
        if each.now.ok:
            checked.add(each.result.key.sha256, each.result.config)
    _report(args, found, skipped, damaged)
    return 1 if damaged or any(not each.now.ok for each in found) else 0


def _of_this_device(winners: tuple[Trial, ...], device: str) -> tuple[list[Trial], dict[str, int]]:
    """(Those of this device and today's code, why the others are not with their number)."""
    from dmuon_tune.backends import backends
    from dmuon_tune.backends.probe import fingerprint
    from dmuon_tune.kernel_specs import kernel
    from dmuon_tune.measure.standing import staleness

    here, skipped = [], dict[str, int]()
    fingerprint_here = fingerprint(device)
    for winner in winners:
        why = staleness(winner.key, fingerprint_here)
        why = why or backends()[kernel(winner.key.kernel).backend].unavailable(fingerprint_here)
        if why is None:
            here.append(winner)
        else:
            skipped[why] = skipped.get(why, 0) + 1
    return here, skipped


def _sample(winners: list[Trial], count: int) -> list[Trial]:
    """``count`` of them, the same ones of the same winners."""
    ordered = sorted(winners, key=lambda winner: winner.key.sha256)
    return random.Random(SEED).sample(ordered, min(count, len(ordered)))


def _recheck(chosen: list[Trial], device: str) -> list[Rechecked]:
    from dmuon_tune.backends.probe import resolve
    from dmuon_tune.measure.executor import Executor
    from dmuon_tune.measure.job import Job
    from dmuon_tune.measurement import Measurement

    jobs = {
        id(job): (job, result) for result in chosen
        for job in [Job(result.key.kernel, result.key.problem, result.config, resolve(device), SEED)]
    }
    found = []
    if jobs:
        with Executor(resolve(device)) as executor:
            for job, outcome in executor.run(job for job, _ in jobs.values()):
                assert isinstance(outcome, Measurement)
                found.append(Rechecked(jobs[id(job)][1], outcome))
                note(f"{len(found)} of {len(chosen)}: {found[-1].result.key.problem.label()} {found[-1].verdict}")
    return found


def _report(args: argparse.Namespace, found: list[Rechecked], skipped: dict[str, int], damaged: list[str]) -> None:
    if args.format == "json":
        print_json({
            "results": [
                {
                    "problem": each.result.key.problem.to_dict(), "kernel": each.result.key.kernel,
                    "config": each.result.config, "kept_us": each.result.measurement.median_us,
                    "now_us": each.now.median_us, "max_rel_err": each.now.max_rel_err, "verdict": each.verdict,
                }
                for each in found
            ],
            "skipped": skipped, "damaged_artefacts": damaged,
        })
        return
    say(table(["problem", "kernel", "config", "kept_us", "now_us", "ratio", "verdict"], [
        [
            each.result.key.problem.label(), each.result.key.kernel, config_text(each.result.config),
            microseconds(each.result.measurement.median_us), microseconds(each.now.median_us),
            None if each.ratio is None else f"{each.ratio:.2f}", each.verdict,
        ]
        for each in found
    ]))
    for why, count in skipped.items():
        note(f"{counted(count, 'winner')} not checked: {why}")
    for line in damaged:
        note(line)

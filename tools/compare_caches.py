"""Says whether two tunings chose alike: each problem's winner in either cache, and how far apart their times are.

    dmuon-tune tune --preset qwen2.5-7b --cache a.sqlite
    dmuon-tune tune --preset qwen2.5-7b --cache b.sqlite
    python tools/compare_caches.py a.sqlite b.sqlite --race cuda

With --race two winners that differ are timed now on that device, one window of each round after round, and the ratio of
those times counts: one kernel's times in two runs differ by several percent. Else, where one run measured both winners,
what counts is how much slower the other run's winner was there, or the ratio of the two runs' times. Exits with 1 where
winners differ by more than --within, or none is common. Below them the chains that both have timed, whose times are of
two runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from _runner import Parser, run

from dmuon_tune.backends.probe import resolve
from dmuon_tune.cache import CacheEntry, Store
from dmuon_tune.cli.output import config_text, microseconds, say, table
from dmuon_tune.measure.executor import Executor
from dmuon_tune.measure.job import Entrant, RaceJob, RaceResult
from dmuon_tune.measure.standing import winners
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group
from dmuon_tune.words import counted

SEED = 2  # of the inputs: others than the tuner's
PREPARE_S = 60.0


@dataclass(frozen=True)
class Tuning:
    """One cache's winners, every time that it holds, by key and configuration, and the times of its recipes' chains."""

    winners: dict[Problem, CacheEntry]
    times_us: dict[tuple[str, str], float]
    chains_us: dict[tuple[Group, str], float]

    @classmethod
    def read(cls, path: str) -> Tuning:
        with Store.open(path, read_only=True) as store:
            found = winners([("", entry) for entry in store.entries()])
            times_us = {
                (trial.key.sha256, config_text(trial.config)): trial.measurement.median_us
                for trial in store.all_trials()
                if trial.measurement.median_us is not None
            }
            chains_us = {
                (recipe.group, recipe.dtype): recipe.cost_us
                for recipe in store.recipes()
                if recipe.timed and recipe.cost_us is not None
            }
        return cls({each.entry.key.problem: each.entry for each in found if each.stale is None}, times_us, chains_us)

    def time_us(self, entry: CacheEntry) -> float | None:
        """What an entry of any run took here, None where it was not measured."""
        return self.times_us.get((entry.key.sha256, config_text(entry.config)))


def apart(first: Tuning, second: Tuning, problem: Problem) -> float:
    """How far apart two winners are: 0 where they are the same."""
    a, b = first.winners[problem], second.winners[problem]
    if (a.key, a.config) == (b.key, b.config):
        return 0.0
    a_us, b_us = a.measurement.median_us or math.inf, b.measurement.median_us or math.inf
    pairs = [(first.time_us(b), a_us), (second.time_us(a), b_us)]
    ratios = [max(1.0, others_us / own_us) for others_us, own_us in pairs if others_us is not None]
    if ratios:
        return sum(ratios) / len(ratios) - 1
    return max(a_us, b_us) / min(a_us, b_us) - 1


def raced(first: Tuning, second: Tuning, problems: Iterable[Problem], device: str) -> dict[Problem, float]:
    """How far apart the two winners of each problem are, timed against each other here; infinitely where one fails."""
    place = resolve(device)
    jobs = [
        RaceJob(problem, tuple(Entrant.of(each.winners[problem]) for each in (first, second)), place, SEED, PREPARE_S)
        for problem in problems
    ]
    found = {}
    if jobs:
        with Executor(place) as executor:
            for job, outcome in executor.run(jobs):
                ended = outcome.measurements if isinstance(outcome, RaceResult) else ()
                times_us = [each.median_us for each in ended if each is not None and each.median_us is not None]
                both = len(times_us) == len(job.entrants)
                found[job.problem] = max(times_us) / min(times_us) - 1 if both else math.inf
    return found


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="compare_caches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--within", type=float, default=0.01, help="of each other's time (default: 0.01)")
    parser.add_argument("--race", metavar="DEVICE", help="time winners that differ against each other on this device")
    args = parser.parse_args(arguments)
    if not args.within > 0:
        parser.error(f"argument --within: {args.within:g} is not more than 0")
    first, second = Tuning.read(args.first), Tuning.read(args.second)
    common = [problem for problem in first.winners if problem in second.winners]
    distances = {problem: apart(first, second, problem) for problem in common}
    if args.race is not None:
        distances |= raced(first, second, [problem for problem in common if distances[problem]], args.race)
    rows, far = [], 0
    for problem, distance in distances.items():
        far += distance > args.within
        cells = [
            cell
            for found in (first.winners[problem], second.winners[problem])
            for cell in (f"{found.key.kernel} {config_text(found.config)}", microseconds(found.measurement.median_us))
        ]
        rows.append([problem.label(), *cells, "same" if distance == 0 else f"{distance:.2%}"])
    say(table(["problem", "first", "us", "second", "us", "apart"], rows))
    chains = [(key, us, second.chains_us[key]) for key, us in first.chains_us.items() if key in second.chains_us]
    if chains:
        say("")
        say(table(["chain", "dtype", "first_us", "second_us", "second_over_first"], [
            [group.label(), dtype, microseconds(a_us), microseconds(b_us), f"{b_us / a_us:.3f}"]
            for (group, dtype), a_us, b_us in chains
        ]))
    alone = len({*first.winners, *second.winners}) - len(common)
    same = sum(row[-1] == "same" for row in rows)
    print(
        f"{counted(len(common), 'problem')} in both caches, {alone} in one alone: {same} with the same winner, {far} "
        f"with winners more than {args.within:.0%} apart",
        file=sys.stderr,
    )
    if chains:
        first_us, second_us = sum(us for _, us, _ in chains), sum(us for *_, us in chains)
        print(
            f"{counted(len(chains), 'chain')} timed in both: {microseconds(second_us)} us in all against "
            f"{microseconds(first_us)}, {second_us / first_us:.3f} times as long",
            file=sys.stderr,
        )
    return 1 if far or not common else 0


if __name__ == "__main__":
    sys.exit(run("compare_caches", main))

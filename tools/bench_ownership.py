"""Solves random ownership problems: how far the slowest owner is from its bound, beside longest-first.

python tools/bench_ownership.py --instances 20 --seconds 2

An instance has 12 classes of 400 matrices in all. A class's time for k matrices is a launch, plus their FLOPs, of which
35 % are spent in whole steps of 2 to 6 matrices, as batches fill a GPU. Owners go from 8 to 256 over the instances.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence

import numpy as np
from _runner import Parser, run

from dmuon_tune.runtime.ownership import Costs, Work, assign
from dmuon_tune.runtime.ownership.costs import Point
from dmuon_tune.words import table

OWNERS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def instance(seed: int, classes: int = 12, matrices: int = 400) -> list[Work]:
    """Random classes, each matrix in a layer of its own class's count."""
    rng = np.random.default_rng(seed)
    counts = np.maximum(1, np.round(rng.dirichlet(np.full(classes, 2.0)) * matrices)).astype(int)
    counts[np.argmax(counts)] += matrices - counts.sum()
    work: list[Work] = []
    for kind, count in enumerate(counts.tolist()):
        launch_us, alone_us = rng.uniform(15, 60), math.exp(rng.uniform(math.log(20), math.log(600)))
        step = int(rng.integers(2, 7))
        costs = Costs.of(
            Point(batch, launch_us + alone_us * (0.65 * batch + 0.35 * step * math.ceil(batch / step)))
            for batch in range(1, count + 1)
        )
        work += [Work(kind + 1, kind + 1, layer, costs, 1) for layer in range(count)]
    return work


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="bench_ownership", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each solution (default: 2)")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    args = parser.parse_args(arguments)
    rows = []
    for number in range(args.instances):
        owners, work = OWNERS[number % len(OWNERS)], instance(number)
        first = assign(work, owners, seconds=0)
        begin = time.monotonic()
        found = assign(work, owners, seconds=args.seconds)
        rows.append({
            "seed": number, "owners": owners, "bound_us": round(found.bound_us, 1),
            "longest_first_us": round(first.makespan_us, 1), "makespan_us": round(found.makespan_us, 1),
            "gap_percent": round(100 * found.gap, 2), "seconds": round(time.monotonic() - begin, 2),
        })
    if args.format == "json":
        print(json.dumps(rows, indent=2))
    else:
        print(table(list(rows[0]), [list(row.values()) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(run("bench_ownership", main))

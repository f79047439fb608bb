"""Measures one kernel's whole space for one product into a cache, and exports it as a record for replay.

    python tools/record_space.py --kernel gram.triton --shape 1x2048x2048x8192 --cache space.sqlite --out gram.json.gz

Interrupt it at any time; the same command goes on.
"""

from __future__ import annotations

import argparse
import sys

from dmuon_tune.backends.probe import fingerprint, resolve
from dmuon_tune.cache import Store
from dmuon_tune.errors import DmuonTuneError, UsageError
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.problem import EPILOGUES, LAYOUTS, Problem
from dmuon_tune.recipe import default_dtype
from dmuon_tune.search import TuneOptions, terminal_progress
from dmuon_tune.search.record import records
from dmuon_tune.search.run import Run
from dmuon_tune.search.schedule import problem_search
from dmuon_tune.words import counted


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", required=True, help="such as gram.triton")
    parser.add_argument("--shape", required=True, help="batch x m x n x k")
    parser.add_argument("--layout", choices=LAYOUTS, default="row")
    parser.add_argument("--epilogue", default="none", help=f"such as {', '.join(EPILOGUES)}")
    parser.add_argument("--dtype", help="default: float16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, help="measuring processes")
    parser.add_argument("--limit", type=int, default=10**9, help="configurations, those in the cache counted")
    parser.add_argument("--budget", type=float, help="seconds for this run")
    parser.add_argument("--cache", required=True, help="cache file that is measured into")
    parser.add_argument("--out", help="record to write: a .json.gz file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    name = resolve(args.device)
    device = fingerprint(name)
    dtype = args.dtype or default_dtype(device.kind)
    spec = kernel(args.kernel)
    batch, m, n, k = extents(args.shape)
    problem = Problem(spec.op, batch, m, n, k, dtype, dtype, args.layout, args.epilogue)
    options = TuneOptions(device=name, trials=args.limit, budget_s=args.budget, workers=args.workers)
    with Store.open_user(args.cache) as store:
        search = problem_search(problem, [spec], device, store, args.limit, 0, "exhaustive")
        with Run(store, options, terminal_progress()) as run:
            run.warm([search])
            run.measure([search])
        (record, *_) = records(store, lambda other, kernel: (other, kernel) == (problem, spec.name))
    missing = search.kernels[0].proposer.unseen
    print(f"{counted(len(record.rows), 'configuration')}, {record.failures} of them failed; {missing} not measured")
    if args.out:
        record.write(args.out)


def extents(text: str) -> list[int]:
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise UsageError(f"shape {text!r} is not batch x m x n x k, such as 1x2048x2048x8192")
    return [int(part) for part in parts]


if __name__ == "__main__":
    try:
        main()
    except DmuonTuneError as error:
        sys.exit(f"record_space: {error}")

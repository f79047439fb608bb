"""Measures one kernel's whole space for one product, or a chain's, and exports it as a record for replay.

    python tools/record_space.py --kernel gram.triton --shape 1x2048x2048x8192 --cache space.sqlite --out gram.json.gz
    python tools/record_space.py --chain 1x2048x8192 --top 6 --cache tuned.sqlite --out chain.json.gz

A chain's space: the pieces of its batch × the --top fastest configurations of each product, which the cache must hold
('dmuon-tune tune --shapes 1x2048x8192 --cache tuned.sqlite'). Interrupt it at any time; the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from _runner import Parser, check_writable, run

from dmuon_tune.cache import Store
from dmuon_tune.cli.options import seconds
from dmuon_tune.errors import UsageError
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.problem import EPILOGUES, LAYOUTS, Problem
from dmuon_tune.recipe import FORMS, Group, default_dtype
from dmuon_tune.search import TuneOptions, terminal_progress
from dmuon_tune.search.chain_space import ChainSpace, chain_space
from dmuon_tune.search.problem_search import problem_search
from dmuon_tune.search.record import Record, records
from dmuon_tune.search.run import Run
from dmuon_tune.words import counted


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="record_space", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", help="such as gram.triton; with --shape")
    parser.add_argument("--shape", help="batch x m x n x k")
    parser.add_argument("--layout", choices=LAYOUTS, default="row")
    parser.add_argument("--epilogue", default="none", help=f"such as {', '.join(EPILOGUES)}")
    parser.add_argument("--chain", metavar="GROUP", help="batch x rows x cols, in place of --kernel and --shape")
    parser.add_argument("--form", choices=FORMS, help="the chain's (default: the fastest by its products' times)")
    parser.add_argument("--top", type=int, default=6, help="configurations of each of a chain's products (default: 6)")
    parser.add_argument("--dtype", help="default: float16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, help="measuring processes")
    parser.add_argument("--limit", type=int, default=10**9, help="configurations, those in the cache counted")
    parser.add_argument("--budget", type=seconds, metavar="TIME", help="of this run, such as 90s")
    parser.add_argument("--cache", required=True, help="cache file that is measured into")
    parser.add_argument("--out", type=Path, help="record to write: a .json.gz file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = options_of(arguments)
    if bool(args.chain) == bool(args.kernel and args.shape):
        raise UsageError("give --kernel and --shape of a product, or --chain")
    check_writable("--out", args.out)
    options = TuneOptions(device=args.device, trials=args.limit, budget_s=args.budget, workers=args.workers)
    with Store.open_user(args.cache) as store, Run(store, options, terminal_progress()) as run:
        record, missing = (record_chain if args.chain else record_product)(args, store, run)
    print(f"{counted(len(record.rows), 'configuration')}, {record.failures} of them failed; {missing} not measured")
    if args.out:
        record.write(args.out)
    return 0


def record_product(args: argparse.Namespace, store: Store, run: Run) -> tuple[Record, int]:
    """The record, and how many configurations it lacks."""
    dtype, spec = args.dtype or default_dtype(run.device.kind), kernel(args.kernel)
    batch, m, n, k = extents(args.shape, "batch x m x n x k, such as 1x2048x2048x8192")
    problem = Problem(spec.op, batch, m, n, k, dtype, dtype, args.layout, args.epilogue)
    search = problem_search(problem, [spec], run.device, store, args.limit, 0, "exhaustive")
    run.warm([search])
    run.measure([search])
    found = records(store, lambda other, kernel: (other, kernel) == (problem, spec.name))
    if not found:
        raise UsageError(f"no configuration of {spec.name} was measured and works; see 'dmuon-tune show --failures'")
    return found[0], search.kernels[0].proposer.unseen


def record_chain(args: argparse.Namespace, store: Store, run: Run) -> tuple[Record, int]:
    """The record, and how many chains it lacks."""
    group = Group(*extents(args.chain, "batch x rows x cols, such as 1x2048x8192"))
    dtype = args.dtype or default_dtype(run.device.kind)
    space: ChainSpace = chain_space(group, dtype, args.form, args.top, run.device, store)
    run.time_chains([space])
    record = space.record(run.device.name)
    if not any(record.times_us):
        raise UsageError(f"no chain of {group.label()} was timed and works; see 'dmuon-tune show --chains'")
    return record, space.size - len(record.rows)


def extents(text: str, what: str) -> list[int]:
    parts = text.split("x")
    if len(parts) != what.count(" x ") + 1 or not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"{text!r} is not {what}")
    return [int(part) for part in parts]


if __name__ == "__main__":
    sys.exit(run("record_space", main))

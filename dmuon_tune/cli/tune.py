"""``dmuon-tune tune``: measures kernels for every product of a model's chains and keeps the results."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE, UsageError
from dmuon_tune.recipe import WEIGHTS_DTYPE
from dmuon_tune.words import counted

from . import caches, division, dry_run, options, workload
from .caches import entry_fields, statuses_text
from .output import config_text, microseconds, note, print_json, ratio, say, table, warn
from .show import recipe_table

EFFORTS = ("quick", "normal", "max")  # dmuon_tune.search.options.EFFORTS, which --help must not import

if TYPE_CHECKING:
    from dmuon_tune.search import ProblemReport, TuneOptions, TuneReport


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "tune", parents=[options.common(), options.model(), options.device(), options.cache()],
        help="measure kernels for a model's matrices and keep the results",
        description="Search, check and time kernels for every product of a model's Newton-Schulz chains, then whole "
        "chains: their form, the pieces of a batch and kernels that tie. The search begins with what all caches, the "
        "shipped one too, hold of the nearest shapes. Every result is kept as it is measured: "
        "interrupt at any time and run the same command again to go on.",
    )
    search = parser.add_argument_group("search")
    search.add_argument(
        "--effort", choices=EFFORTS, default="normal",
        help="quick: 8 trials a problem, 70 s in all; normal: 80 and 7m30s; max: 200 without a limit (default: normal)",
    )
    search.add_argument(
        "--trials", type=options.trials, metavar="N",
        help="configurations a problem over all its kernels, those in the cache counted, or 'all'; whatever time they "
        "take unless --budget limits it (default: the effort's)",
    )
    search.add_argument(
        "--budget", type=options.seconds, metavar="TIME",
        help="stop after this time, such as 4m or 1h; shares of it are for races of finalists and for whole chains "
        "(default: the effort's)",
    )
    search.add_argument(
        "--backends", type=options.names, metavar="NAMES", help="only these, such as tilelang,library (default: all)"
    )
    search.add_argument(
        "--sampler", default="combined", metavar="NAME",
        help="what picks configurations, such as tpe or exhaustive; an unknown name lists all (default: combined)",
    )
    search.add_argument("--seed", type=options.integer, default=0, help="seed of the search (default: 0)")
    search.add_argument(
        "--devices", type=options.devices, default=(), metavar="LIST",
        help="several GPUs of one kind, such as 0,1,2,3: each measures some of the problems (default: --device alone)",
    )
    search.add_argument("--workers", type=options.positive, metavar="N", help="measuring processes of each device")
    search.add_argument("--compile-timeout", type=options.seconds, default=120.0, metavar="TIME", help="default: 2m")
    search.add_argument("--run-timeout", type=options.seconds, default=60.0, metavar="TIME", help="default: 1m")
    search.add_argument(
        "--storage", type=options.place, metavar="URL",
        help="tune into this database, such as postgresql+psycopg://user@host/name, together with every run that does; "
        "the password may stand in PGPASSWORD or ~/.pgpass",
    )
    division.add_options(parser.add_argument_group("owners"), needed=False)
    search.add_argument("--dry-run", action="store_true", help="say what would be measured and how long it takes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    work = workload.of(args)
    from dmuon_tune.cache import Layers, Store
    from dmuon_tune.search import TuneOptions, terminal_progress, tune
    from dmuon_tune.search.kernel_search import check_backends

    check_backends(args.backends)
    chosen = TuneOptions.of_effort(
        args.effort, args.trials, args.budget, device=args.device, devices=args.devices, dtype=args.dtype,
        backends=args.backends, sampler=args.sampler, seed=args.seed, workers=args.workers,
        compile_timeout_s=args.compile_timeout, run_timeout_s=args.run_timeout,
        weights_dtype=args.param_dtype or WEIGHTS_DTYPE,
    )
    work = _of_owners(args, work, chosen)
    if args.dry_run:
        return dry_run.run(args, work, chosen, _place(args))
    try:
        with _terminable(), Store.open_user(_place(args)) as store, Layers.open() as layers:
            report = tune(work.groups, store, chosen, terminal_progress(), layers)
            where = store.where
    except KeyboardInterrupt as stop:
        ended, code = _ENDS[type(stop)]
        note(f"{ended}; what was measured is kept: run the same command to go on")
        return code
    for name, reason in _gaps(report, args.backends):
        warn(f"backend {name} is left out: {reason}")
    for name, reason in _unserved(report, args.backends or ()):
        warn(f"backend {name} serves none of these problems: {reason}")
    if args.format == "json":
        print_json(_json(report, work, where))
    else:
        _print(report)
    return _conclude(report, where)


class Terminated(KeyboardInterrupt):
    """SIGTERM: a batch system ends the job."""


_ENDS = {
    KeyboardInterrupt: ("interrupted", INTERRUPTED_EXIT_CODE),
    Terminated: ("terminated", TERMINATED_EXIT_CODE),
}


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the block as an interrupt does, so that its claims are given back at once."""

    def stop(*ignored: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _of_owners(args: argparse.Namespace, work: workload.Workload, chosen: TuneOptions) -> workload.Workload:
    """With ``--world-size`` the batches that owners run in place of one process's, divided as training does by what the
    caches know now."""
    if not args.world_size:
        for name in ("bucket_bytes", "momentum_dtype"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is of owners' batches; give --world-size, too")
        return work
    from dmuon_tune.backends.probe import fingerprint
    from dmuon_tune.runtime.ownership import assign

    with caches.stores(_place(args)) as stores:
        divided = division.divide(args, work, fingerprint(chosen.device_names()[0]), stores)
    batches = divided.batches(assign(divided.work, args.world_size).owner)
    labels = " ".join(batch.label() for batch in batches)
    note(f"{counted(args.world_size, 'owner')} run {counted(len(batches), 'batch', 'batches')}: {labels}")
    return replace(work, groups=tuple(batches))


def _place(args: argparse.Namespace) -> str | None:
    """The cache to tune into: a file, a URL, or None for the user's."""
    from sqlalchemy import URL

    from dmuon_tune.cache.database import locate

    place: str | None = args.cache if args.storage is None else args.storage
    if args.storage is not None and args.cache is not None:
        raise UsageError("--cache and --storage both name the cache; give one of them")
    if args.storage is not None and not ("://" in args.storage and isinstance(locate(args.storage), URL)):
        raise UsageError("--storage takes a server's URL, such as postgresql+psycopg://user@host/name; --cache, a file")
    return place


def _gaps(report: TuneReport, asked: tuple[str, ...] | None) -> list[tuple[str, str]]:
    """(Backend, why it cannot run here) of those asked for, or by default of all but other projects' kernels."""
    from dmuon_tune.backends import is_peer

    return [(name, reason) for name, reason in report.unavailable.items() if name in (asked or ()) or not is_peer(name)]


def _unserved(report: TuneReport, names: Iterable[str]) -> list[tuple[str, str]]:
    """(Backend, its first reason) of the named backends that run here but have no legal configuration for a problem."""
    from dmuon_tune.kernel_specs import kernels

    found = []
    for name in names:
        pairs = [
            (spec, problem.problem)
            for problem in report.problems for spec in kernels(problem.problem.op) if spec.backend == name
        ]
        if name in report.unavailable or any(spec.legal_space(problem, report.device) for spec, problem in pairs):
            continue
        reasons = (spec.why_none(problem, report.device) for spec, problem in pairs)
        found.append((name, next(reasons, "it has no kernel of their ops")))
    return found


def _conclude(report: TuneReport, where: str) -> int:
    if report.measured:
        note(f"{counted(report.measured, 'result')} measured, {report.reused} reused; kept in {where}")
    elif report.complete:
        note(f"nothing to tune: the cache {where} has {counted(report.reused, 'result')}")
    if not report.complete:
        before = "every problem had its trials" if report.measured else "anything was measured"
        note(f"the budget ended before {before}; run the same command again to go on, or with a larger --budget")
    if report.raced:
        note(f"{counted(report.raced, 'race')} of finalists decided for the winners of their problems")
    _conclude_chains(report)
    failures = sum(count for problem in report.problems for name, count in problem.statuses.items() if name != "ok")
    if failures:
        note(f"{counted(failures, 'configuration')} failed; 'dmuon-tune show --failures' says why")
    failed = [problem for problem in report.problems if problem.winner is None]
    needed = [problem for problem in failed if not problem.is_end]
    untried = [] if report.complete else [problem for problem in failed if not any(problem.statuses.values())]
    for problem in failed:
        if problem not in untried:
            tried = statuses_text(problem.statuses) or "none tried"
            without = "; training does without this end of a chain" if problem.is_end else ""
            warn(f"{problem.problem.label()}: no configuration works ({tried}){without}")
    if untried:
        note(f"no result yet for {len(untried)} of {counted(len(report.problems), 'problem')}")
    return 1 if needed and report.complete else 0


def _conclude_chains(report: TuneReport) -> None:
    chains = report.chains
    if chains.timed:
        timed = counted(chains.timed, "whole chain")
        note(f"{timed} timed, {chains.reused} reused; 'dmuon-tune show --chains' lists them")
    if chains.unfinished:
        estimated = sum(not recipe.timed for recipe in report.recipes)
        note(
            f"the budget ended before the chains of {counted(chains.unfinished, 'group')} were all timed (estimates: "
            f"{counted(estimated, 'recipe')}); run the same command again to go on, or with a larger --budget"
        )
    if chains.failed:
        note(f"{counted(chains.failed, 'whole chain')} failed; 'dmuon-tune show --failures' says why")


def _library_us(problem: ProblemReport) -> float | None:
    return problem.library.measurement.median_us if problem.library else None


def _print(report: TuneReport) -> None:
    rows = []
    for problem in report.problems:
        winner, library_us = problem.winner, _library_us(problem)
        median_us = winner.measurement.median_us if winner else None
        rows.append([
            problem.problem.label(), winner.key.kernel if winner else None,
            config_text(winner.config) if winner else None, microseconds(median_us), microseconds(library_us),
            ratio(library_us, median_us), statuses_text(problem.statuses),
        ])
    say(table(["problem", "kernel", "config", "median_us", "library_us", "speedup", "trials"], rows))
    if report.recipes:
        say()
        say(recipe_table([(None, recipe) for recipe in report.recipes]))


def _json(report: TuneReport, work: workload.Workload, where: str) -> dict[str, Any]:
    return {
        "model": work.label,
        "device": report.device.to_dict(),
        "cache": where,
        "measured": report.measured,
        "reused": report.reused,
        "complete": report.complete,
        "raced": report.raced,
        "chains": asdict(report.chains),
        "unavailable": dict(report.unavailable),
        "problems": [
            {
                "problem": problem.problem.to_dict(),
                "label": problem.problem.label(),
                "winner": entry_fields(problem.winner) if problem.winner else None,
                "library_us": _library_us(problem),
                "measured": problem.measured,
                "reused": problem.reused,
                "statuses": dict(problem.statuses),
            }
            for problem in report.problems
        ],
        "recipes": [recipe.to_dict() for recipe in report.recipes],
    }

"""``dmuon-tune cache build``: compiles a cache's winners to artefacts that training loads without a compiler."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import INTERRUPTED_EXIT_CODE, MissingEntryError
from dmuon_tune.words import counted

from . import options, workload
from .output import note, print_json, say, table, warn

MANY = 100  # artefacts: some minutes on many processors

if TYPE_CHECKING:
    from dmuon_tune.cache import ArtefactStore, Store
    from dmuon_tune.device import DeviceFingerprint
    from dmuon_tune.measure.executor import Executor
    from dmuon_tune.measure.job import BuildJob, Built


def register(actions: Any) -> None:
    parser = actions.add_parser(
        "build", parents=[options.common(), options.cache(), options.model()],
        help="compile the winners, so that training need not",
        description="Compile the winners of a cache, and the kernels its recipes run, into the folder artefacts beside "
        "it, which training then loads without a compiler, nvcc or a kernel language: those of one model where that is "
        "named, otherwise all. The GPU need not be here.",
    )
    parser.add_argument(
        "--arch", action="append", default=[], metavar="ARCH",
        help="only this architecture, such as sm_90a or cpu (default: every one that the cache holds; repeatable)",
    )
    parser.add_argument(
        "--jobs", type=options.positive, metavar="N",
        help="processes that compile beside each other (default: one a processor, as far as memory allows)",
    )
    parser.add_argument(
        "--compile-timeout", type=options.seconds, default=300.0, metavar="TIME",
        help="of one artefact, then its process is replaced (default: 5m)",
    )
    parser.add_argument("--rebuild", action="store_true", help="compile also what is there already")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from dmuon_tune.cache import ArtefactStore, Store, user_cache_path
    from dmuon_tune.measure.artefact import FAILED

    path = args.cache or str(user_cache_path())
    artefacts, work = ArtefactStore.beside(path), workload.chosen(args)
    with Store.open(path, read_only=True) as store:
        jobs = _jobs(store, path, artefacts, args, work)
    if not jobs:
        note("nothing to compile: the library or a kernel of another project won everything that is current")
    if work is None and len(jobs) >= MANY:
        note(f"{len(jobs)} artefacts, of all that the cache holds; --preset, --model or --shapes chooses")
    built: dict[int, Built] = {}
    try:
        for place, result in _results(jobs, artefacts, args):
            built[place] = result
            job = jobs[place]
            where = f"{job.kernel_name} for {job.problem.label()} on {job.target.arch}"
            note(f"{len(built)}/{len(jobs)} {result.state}: {where}")
    except KeyboardInterrupt:
        note("interrupted; what was built is kept: run the same command to go on")
        return INTERRUPTED_EXIT_CODE
    rows = [
        {"kernel": job.kernel_name, "problem": job.problem.label(), "arch": job.target.arch, **vars(built[place])}
        for place, job in enumerate(jobs)
    ]
    if args.format == "json":
        print_json({"folder": str(artefacts.folder), "artefacts": rows})
    else:
        say(table(["kernel", "problem", "arch", "state", "detail"], [list(row.values()) for row in rows]))
    failed = [row for row in rows if row["state"] == FAILED]
    if failed:
        note(f"error: {counted(len(failed), 'artefact')} not built; 'detail' says why, and training compiles these")
    return 1 if failed else 0


def _jobs(
    store: Store, path: str, artefacts: ArtefactStore, args: argparse.Namespace, work: workload.Workload | None
) -> list[BuildJob]:
    """What to build for each device model of the cache, of a model (None: all); MissingEntryError where it holds
    nothing for what is asked."""
    from dmuon_tune.cache import Layers
    from dmuon_tune.measure.job import BuildJob
    from dmuon_tune.measure.standing import winners
    from dmuon_tune.runtime.needed import needed, of_groups
    from dmuon_tune.space import config_to_dict

    wanted, entries = args.arch, store.entries()
    devices = list(dict.fromkeys(entry.key.device for entry in entries))
    chosen = [device for device in devices if not wanted or any(_is_arch(device, name) for name in wanted)]
    if not chosen:
        held = ", ".join(sorted({device.arch for device in devices})) or "nothing"
        what = f"for {', '.join(wanted)}" if wanted else "to build"
        raise MissingEntryError(f"cache {store.where} has nothing {what}; it holds {held}; tune there first")
    of_chosen = [("", entry) for entry in entries if entry.key.device in chosen]
    standing = winners(of_chosen)
    best = [found.entry for found in standing if found.stale is None]
    if len(best) < len(standing):
        stale = f"{len(standing) - len(best)} of {counted(len(standing), 'winner')}"
        warn(f"{stale} left out, made by other code or tools than this machine's; 'dmuon-tune show' says which")
    jobs, is_tuned = [], work is None
    environ = {"DMUON_TUNE_CACHE_PATH": path, "DMUON_TUNE_CACHE_DIR": str(artefacts.folder.parent)}
    with Layers.open(environ) as layers:
        for device in chosen:
            recipes, of_device = store.recipes(device), [entry for entry in best if entry.key.device == device]
            if work is not None:
                recipes, of_device = of_groups(work.groups, recipes, of_device)
                is_tuned |= bool(recipes or of_device)
            for each in needed(layers, device, recipes, of_device):
                config = config_to_dict(each.config)
                jobs.append(BuildJob(str(artefacts.folder), each.spec.name, each.problem, config, device, args.rebuild))
    if work is not None and not is_tuned:
        raise MissingEntryError(f"cache {store.where} has nothing for {work.label}; tune it there first")
    return jobs


def _is_arch(device: DeviceFingerprint, name: str) -> bool:
    """Whether a device is of an architecture: ``sm_90a`` and ``sm_90`` are one, ``cpu`` is any CPU."""
    return name == device.kind or re.sub(r"(?<=\d)[af]$", "", name) == device.arch


def _results(
    jobs: Sequence[BuildJob], artefacts: ArtefactStore, args: argparse.Namespace
) -> Iterator[tuple[int, Built]]:
    """How each job ended, by its place, in the order in which they end.

    What is here already, or cannot be built here, takes no process. Of those that compile to the same code one is
    compiled. What another process is building is waited for at the end.
    """
    from dmuon_tune.measure.artefact import BUSY, FAILED, kept, key_of
    from dmuon_tune.measure.executor import Executor, default_builders
    from dmuon_tune.measure.job import Built

    first: dict[Any, int] = {}  # of each code the job that compiles it
    waiting: list[int] = []
    alike: list[int] = []
    for place, job in enumerate(jobs):
        refused = _refusal(job)
        known = Built(FAILED, refused) if refused else kept(job)
        leader = first.setdefault(_code_of(job), place)
        if known is not None:
            yield place, known
        else:
            (waiting if leader == place else alike).append(place)
    if not waiting and not alike:
        return
    artefacts.prepare()
    processes = min(args.jobs or default_builders(), max(1, len(waiting)))
    failed: dict[int, Built] = {}
    with Executor("cpu", processes, compile_timeout_s=args.compile_timeout) as executor:
        busy = []
        for place, result in _run(executor, {place: jobs[place] for place in waiting}):
            if result.state == BUSY:
                busy.append(place)
                continue
            if result.state == FAILED:
                failed[place] = result
            yield place, result
        yield from _run(executor, {place: replace(jobs[place], wait=True) for place in busy})
        rest = {}
        for place in alike:
            leader = first[_code_of(jobs[place])]
            if leader in failed:
                yield place, failed[leader]
            else:
                rest[place] = replace(jobs[place], wait=True, like=key_of(jobs[leader]).sha256)
        yield from _run(executor, rest)


def _run(executor: Executor, jobs: dict[int, BuildJob]) -> Iterator[tuple[int, Built]]:
    """How each job ended, by its place; a process that died or was killed is a failure of the job that it had."""
    from dmuon_tune.measure.artefact import FAILED
    from dmuon_tune.measure.job import AnyJob, Built
    from dmuon_tune.measurement import Measurement

    places: dict[AnyJob, int] = {job: place for place, job in jobs.items()}
    for job, outcome in executor.run(jobs.values()):
        if not isinstance(outcome, Built):
            assert isinstance(outcome, Measurement)
            outcome = Built(FAILED, f"{outcome.status}: {outcome.log.splitlines()[0]}")
        yield places[job], outcome


def _refusal(job: BuildJob) -> str | None:
    """Why this machine cannot compile for a device."""
    from dmuon_tune.backends import backends, probe
    from dmuon_tune.kernel_specs import kernel

    if job.target.kind == "cpu" and job.target != probe.fingerprint("cpu"):
        return f"CPU code is compiled on the machine it was tuned on, {job.target.name}"
    return backends()[kernel(job.kernel_name).backend].unavailable(job.target)


def _code_of(job: BuildJob) -> Any:
    """What is equal for jobs that compile to the same code: a device's memory changes none."""
    return job.kernel_name, job.problem, json.dumps(job.config, sort_keys=True), replace(job.target, memory_bytes=0)

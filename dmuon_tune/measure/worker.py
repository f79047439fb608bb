"""The measuring process: takes jobs from a pipe, compiles, verifies and times each, and answers the outcome."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import ops
from dmuon_tune.measurement import Measurement
from dmuon_tune.processes import die_with

from .artefact import build_artefact
from .build import compile_once
from .chain import BoundChain, check_and_time
from .device_lock import device_lock
from .job import AnyJob, BuildJob, ChainJob, Job, Outcome, RaceJob, last_traceback, write_turn
from .race import race
from .rotation import UnlikeResults
from .timing import time_launch
from .verify import verify

Report = Callable[[str, Any], None]  # tells the parent of a "phase", or of the "entrant" of a race whose turn it is


def main(pipe: int, turn: int, parent: int) -> None:
    """Serve jobs from file descriptor ``pipe`` until it closes or the process ``parent`` dies; the file ``turn`` says
    which entrant of a race is at work."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # of a whole job: the parent ends its workers
        signal.signal(stop, signal.SIG_IGN)
    die_with(parent)
    gc.freeze()  # else the collection after each job goes through all that was imported, a tenth of a second
    gc.enable()  # disabled by the executor's command
    connection = Connection(pipe)

    def report(kind: str, content: Any) -> None:
        if kind == "entrant":  # before every window: a message would wake the parent, which disturbs a CPU's timing
            write_turn(turn, content)
        else:
            connection.send((kind, content))

    report("ready", None)
    while True:
        try:
            job: AnyJob = connection.recv()
        except (EOFError, OSError):
            return
        outcome = measure(job, report)
        sys.stdout.flush()
        sys.stderr.flush()
        report("result", outcome)


def measure(job: AnyJob, report: Report) -> Outcome:
    """Build, check and time one configuration, one chain or one race, or build one artefact. On a CPU all measuring
    holds the device's lock, because a compilation would disturb another process's timing; on a GPU only the launches
    do."""
    if isinstance(job, BuildJob):
        return build_artefact(job, report)
    device = _enter(job.device)
    with ExitStack() as held:

        def lock() -> None:
            report("phase", "waiting")
            held.enter_context(device_lock(job.device))

        if device.kind == "cpu":
            lock()
        outcome = _measure(job, device, report, lock if device.kind == "cuda" else lambda: None)
        gc.collect()
        if device.kind == "cuda" and not (isinstance(outcome, Measurement) and outcome.status == "launch_error"):
            torch.cuda.empty_cache()
        return outcome


def _measure(
    job: Job | ChainJob | RaceJob, device: DeviceFingerprint, report: Report, lock: Callable[[], None]
) -> Outcome:
    """``lock`` is called before the first launch."""
    if isinstance(job, RaceJob):
        return race(job, device, report, lock)
    report("phase", "compiling")
    begin = time.perf_counter()
    try:
        subject, resources = _build(job, device, report)
    except (Exception, SystemExit):
        return Measurement("compile_error", resources={"compile_s": _since(begin)}, log=last_traceback())
    resources = {**resources, "compile_s": _since(begin)}
    lock()
    report("phase", "running")
    begin = time.perf_counter()
    try:
        if isinstance(job, ChainJob):
            outcome = check_and_time(subject, job, resources)
        else:
            outcome = _verify_and_time(job, subject, resources, device)
    except (Exception, SystemExit):
        outcome = Measurement("launch_error", resources=resources, log=last_traceback())
    return replace(outcome, resources={**outcome.resources, "run_s": _since(begin)})


def _since(begin: float) -> float:
    """Seconds since then, to the millisecond."""
    return round(time.perf_counter() - begin, 3)


def _build(job: Job | ChainJob, device: DeviceFingerprint, report: Report) -> tuple[Any, dict[str, Any]]:
    """(what runs, its resources): a product's launch or a whole chain."""
    if isinstance(job, ChainJob):
        return BoundChain(job.recipe, device, job.device, lambda: report("phase", "compiling")), {}
    compiled = compile_once(job.kernel_name, job.problem, job.config, device)
    return compiled.launch, compiled.resources


def _enter(device: str) -> DeviceFingerprint:
    found = fingerprint(device)
    if found.kind == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)
        torch.set_num_threads(1)  # many workers share the host's cores
    else:
        torch.set_num_threads(found.sm_count)
    return found


def _verify_and_time(
    job: Job, launch: Callable[..., Any], resources: dict[str, Any], device: DeviceFingerprint
) -> Measurement:
    op = ops()[job.problem.op]
    verdict = verify(launch, op, job.problem, job.device, job.seed)
    if verdict.failure:
        return Measurement("wrong_result", max_rel_err=verdict.max_rel_err, resources=resources, log=verdict.failure)
    try:
        timing = time_launch(launch, op, job.problem, job.device, device, job.seed)
    except UnlikeResults as error:
        return Measurement("wrong_result", max_rel_err=verdict.max_rel_err, resources=resources, log=str(error))
    resources = {**resources, **timing.facts(), "rotating_sets": timing.sets}
    return Measurement.from_samples(timing.samples_us, verdict.max_rel_err or 0.0, resources)

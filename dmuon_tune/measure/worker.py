"""The measuring process: takes jobs from a pipe, compiles, verifies and times each, and answers a Measurement."""

from __future__ import annotations

import gc
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.measurement import Measurement
from dmuon_tune.processes import die_with
from dmuon_tune.space import config_from_dict

from .build import compile_kernel
from .chain import BoundChain, check_and_time
from .device_lock import device_lock
from .job import LOG_CHARS, AnyJob, ChainJob, Job
from .timing import time_launch
from .verify import verify

Report = Callable[[str], None]


def main(pipe: int, parent: int) -> None:
    """Serve jobs from file descriptor ``pipe`` until it closes or the process ``parent`` dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    connection = Connection(pipe)
    connection.send(("ready", None))
    while True:
        try:
            job: AnyJob = connection.recv()
        except (EOFError, OSError):
            return
        measurement = measure(job, lambda phase: connection.send(("phase", phase)))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(("result", measurement))


def measure(job: AnyJob, report: Report) -> Measurement:
    """Build, check and time one configuration or one chain. On a CPU all of it holds the device's lock, because a
    compilation would disturb another process's timing; on a GPU only the launches do."""
    device = _enter(job.device)
    with ExitStack() as held:
        if device.kind == "cpu":
            report("waiting")
            held.enter_context(device_lock(job.device))
        report("compiling")
        begin = time.perf_counter()
        try:
            subject, resources = _build(job, device, report)
        except (Exception, SystemExit):
            return Measurement("compile_error", log=_traceback())
        resources = {**resources, "compile_s": round(time.perf_counter() - begin, 3)}
        if device.kind == "cuda":
            report("waiting")
            held.enter_context(device_lock(job.device))
        report("running")
        return _launch(job, subject, resources, device)


def _build(job: AnyJob, device: DeviceFingerprint, report: Report) -> tuple[Any, dict[str, Any]]:
    """(what runs, its resources): a product's launch or a whole chain."""
    if isinstance(job, ChainJob):
        return BoundChain(job.recipe, device, job.device, lambda: report("compiling")), {}
    spec = kernel(job.kernel_name)
    compiled = compile_kernel(spec, job.problem, config_from_dict(spec.Config, job.config), device)
    return compiled.launch, compiled.resources


def _enter(device: str) -> DeviceFingerprint:
    found = fingerprint(device)
    if found.kind == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)
        torch.set_num_threads(1)  # many workers share the host's cores
    else:
        torch.set_num_threads(found.sm_count)
    return found


def _launch(
    job: AnyJob, subject: Any, resources: dict[str, Any], device: DeviceFingerprint
) -> Measurement:
    try:
        if isinstance(job, ChainJob):
            measurement = check_and_time(subject, job, resources)
        else:
            measurement = _verify_and_time(job, subject, resources, device)
    except (Exception, SystemExit):
        return Measurement("launch_error", resources=resources, log=_traceback())
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()
    return measurement


def _verify_and_time(
    job: Job, launch: Callable[..., Any], resources: dict[str, Any], device: DeviceFingerprint
) -> Measurement:
    op = ops()[job.problem.op]
    verdict = verify(launch, op, job.problem, job.device, job.seed)
    if verdict.failure:
        return Measurement("wrong_result", max_rel_err=verdict.max_rel_err, resources=resources, log=verdict.failure)
    timing = time_launch(launch, op, job.problem, job.device, device, job.seed)
    resources = {**resources, **timing.facts(), "rotating_sets": timing.sets}
    return Measurement.from_samples(timing.samples_us, verdict.max_rel_err or 0.0, resources)


def _traceback() -> str:
    return traceback.format_exc()[-LOG_CHARS:]

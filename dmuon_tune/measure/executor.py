"""Runs jobs in measuring processes that may hang or die: whatever happens, each job has an outcome."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing import connection
from typing import Any

from dmuon_tune.errors import DmuonTuneError
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.processes import ended, free_memory_bytes, processors

from .job import LOG_CHARS, AnyJob, Job, Outcome, kernels_of, read_turn, write_turn

__all__ = ["Executor", "Job", "default_builders", "default_workers"]

START_TIMEOUT_S = 300.0  # importing PyTorch from a cold network file system takes minutes
POLL_S = 0.5  # a dead worker's child may keep its pipe open, so its exit is also asked for
GPU_MOST_WORKERS = 16
BUILDER_BYTES = 2**30  # PyTorch, the DSLs and one compiler; 0.53 GB and as much for nvcc were seen
# Not multiprocessing's spawn, which runs the caller's main module again: that fails for a script on stdin and for one
# without a __main__ guard. No garbage collection until then: imports leave little, and it takes a tenth of their time.
BOOTSTRAP = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from dmuon_tune.measure.worker import main; main(*map(int, sys.argv[2:]))"
)


def default_workers(device_kind: str, devices: int = 1) -> int:
    """One on a CPU, where a second would disturb the timing; for each of so many GPUs as many as compile beside each
    other."""
    if device_kind == "cpu":
        return 1
    return max(1, min(GPU_MOST_WORKERS, (processors() - 2) // devices))


def default_builders() -> int:
    """As many processes as compile beside each other and launch nothing: one a processor, as far as memory allows."""
    free_bytes = free_memory_bytes()
    fitting = processors() if free_bytes is None else free_bytes // BUILDER_BYTES
    return max(1, min(processors(), fitting))


class Executor:
    """``workers`` measuring processes for one device; a context manager that kills them on leaving.

    A job has ``compile_timeout_s`` to compile and ``run_timeout_s`` to be verified and timed; waiting for the device
    counts for neither. A worker that exceeds its time is killed (``timeout``), one that dies is a ``crashed``
    measurement; both are replaced. Where that ends a race, the resources name the ``entrant`` (its index) whose turn it
    was. Use it from one thread.
    """

    def __init__(
        self,
        device: str,
        workers: int | None = None,
        compile_timeout_s: float = 120.0,
        run_timeout_s: float = 60.0,
    ) -> None:
        self.device = device
        self.capacity = workers or default_workers("cpu" if device == "cpu" else "cuda")
        self._timeouts_s = {
            "starting": START_TIMEOUT_S, "compiling": compile_timeout_s, "waiting": None, "running": run_timeout_s,
        }
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker; jobs under way are forgotten."""
        for worker in self._idle + self._busy:
            worker.send_kill()  # all before any is waited for: leaving a GPU takes each a while
        for worker in self._idle + self._busy:
            worker.kill()
        self._idle, self._busy = [], []

    @property
    def in_flight(self) -> int:
        return len(self._busy)

    @property
    def has_room(self) -> bool:
        return len(self._busy) < self.capacity

    @property
    def pipes(self) -> list[connection.Connection]:
        """What becomes readable when a job under way may have ended."""
        return [worker.pipe for worker in self._busy]

    def warm(self, jobs: int) -> None:
        """Start the processes that so many jobs will use, so that they import while their caller plans."""
        while len(self._idle) + len(self._busy) < min(self.capacity, jobs):
            self._idle.append(_Worker())

    def submit(self, job: AnyJob) -> None:
        """Start a job, in the free process that has compiled most of what it runs; RuntimeError where none is free."""
        if not self.has_room:
            raise RuntimeError("every worker is busy; wait() first")
        for dead in [each for each in self._idle if not each.alive]:
            self._idle.remove(dead)
            dead.kill()
        needed = kernels_of(job)
        if self._idle:  # of equals the last that became free
            worker = max(reversed(self._idle), key=lambda each: len(each.compiled & needed))
            self._idle.remove(worker)
        else:
            worker = _Worker()
        self._busy.append(worker)
        worker.compiled |= needed
        worker.begin(job)

    def wait(self, timeout_s: float | None = None) -> tuple[AnyJob, Outcome] | None:
        """The next job that ends, or None after ``timeout_s`` seconds. DmuonTuneError where no worker can start."""
        if not self._busy:
            raise RuntimeError("no job is under way")
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = POLL_S if end is None else min(POLL_S, end - time.monotonic())
            ready = connection.wait(self.pipes, max(0.0, left))
            for worker in list(self._busy):
                outcome = worker.advance(worker.pipe in ready, self._timeouts_s)
                if outcome is not None:
                    return self._retire(worker, outcome), outcome
            if end is not None and time.monotonic() >= end:
                return None

    def run(self, jobs: Iterable[AnyJob]) -> Iterator[tuple[AnyJob, Outcome]]:
        """Every job's outcome, in the order in which they end; ``jobs`` is read only as workers become free."""
        remaining = iter(jobs)
        exhausted = False
        while True:
            while not exhausted and self.has_room:
                job = next(remaining, None)
                exhausted = job is None
                if job is not None:
                    self.submit(job)
            if not self.in_flight:
                return
            outcome = self.wait()
            if outcome is not None:
                yield outcome

    def _retire(self, worker: _Worker, outcome: Outcome) -> AnyJob:
        self._busy.remove(worker)
        job = worker.end()
        # A failed launch may leave a CUDA context in which every later call fails too.
        is_failed_launch = isinstance(outcome, Measurement) and outcome.status == "launch_error"
        if worker.alive and not (is_failed_launch and job.device != "cpu"):
            self._idle.append(worker)
        else:
            worker.kill()
        return job


class _Worker:
    """One measuring process, its pipe, what it is doing, and which kernels it has ``compiled`` for that and before."""

    def __init__(self) -> None:
        self.compiled: set[tuple[str, Problem, str]] = set()
        self.pipe, child = connection.Pipe()
        self._output = tempfile.TemporaryFile()
        # Shared with the child, so that its next line lands at the start after the file is emptied.
        fcntl.fcntl(self._output, fcntl.F_SETFL, fcntl.fcntl(self._output, fcntl.F_GETFL) | os.O_APPEND)
        self._turn = tempfile.TemporaryFile()
        arguments = [json.dumps(sys.path), str(child.fileno()), str(self._turn.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(child.fileno(), self._turn.fileno()),
            start_new_session=True,  # its compilers die with it, and Ctrl-C reaches the parent alone
        )
        child.close()
        self._job: AnyJob | None = None
        self._phase = "starting"
        self._since = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def begin(self, job: AnyJob) -> None:
        self._job = job
        write_turn(self._turn.fileno(), None)
        self._output.truncate(0)
        if self._phase != "starting":
            self._enter("compiling")
        try:
            self.pipe.send(job)
        except OSError:
            pass  # it died while idle: advance() finds the pipe's end

    def end(self) -> AnyJob:
        if self._job is None:
            raise RuntimeError("this worker has no job")
        job, self._job = self._job, None
        return job

    def advance(self, readable: bool, timeouts_s: dict[str, float | None]) -> Outcome | None:
        """Take one message or notice death or lateness; the job's outcome once it has one."""
        if readable:
            try:
                kind, content = self.pipe.recv()
            except (EOFError, OSError):
                return self._died()
            return self._message(kind, content)
        if not self.alive and not self.pipe.poll():
            return self._died()
        limit_s = timeouts_s[self._phase]
        if limit_s is None or time.monotonic() - self._since <= limit_s:
            return None
        phase = self._phase
        self.kill()
        if phase == "starting":
            raise DmuonTuneError(f"a measuring process did not start within {limit_s:.0f} s; try fewer --workers")
        return self._failure("timeout", f"still {phase} after {limit_s:g} s")

    def send_kill(self) -> None:
        """Have the process and its children killed, without waiting for it."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()

    def kill(self) -> None:
        """Kill the process and its children; returns once it is gone or cannot be (stuck in a driver)."""
        if self.pipe.closed:
            return
        self.send_kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass
        self.pipe.close()

    def _message(self, kind: str, content: Any) -> Outcome | None:
        if kind in ("ready", "phase"):
            self._enter("compiling" if kind == "ready" else content)
        elif kind == "result":
            outcome: Outcome = content
            if not isinstance(outcome, Measurement) or outcome.ok:
                return outcome
            return replace(outcome, log=self._with_output(outcome.log))
        return None

    def _enter(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()

    def _died(self) -> Measurement:
        phase = self._phase
        self.kill()
        how = ended(self._process.returncode)
        if phase == "starting":
            last = self._tail().strip().splitlines()[-1:] or ["no output"]
            raise DmuonTuneError(f"a measuring process could not start ({how}): {last[0]}; see 'dmuon-tune doctor'")
        return self._failure("crashed", f"process died while {phase}: {how}")

    def _failure(self, status: str, text: str) -> Measurement:
        entrant = read_turn(self._turn.fileno())
        resources = {} if entrant is None else {"entrant": entrant}
        return Measurement(status, resources=resources, log=self._with_output(text))

    def _with_output(self, text: str) -> str:
        return "\n".join(part for part in (text.rstrip(), self._tail().rstrip()) if part)

    def _tail(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        start = max(0, size - LOG_CHARS)
        return os.pread(self._output.fileno(), LOG_CHARS, start).decode(errors="replace")

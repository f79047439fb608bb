"""Measures within the tuning process, for scripts that fork many runs: a process for it takes seconds to start."""

from __future__ import annotations

import gc

from dmuon_tune.backends import backends
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.measure import worker
from dmuon_tune.measure.executor import Executor
from dmuon_tune.measure.job import AnyJob, Outcome


def prepare() -> None:
    """Import what each fork would, and leave it out of their garbage collections."""
    kernels()
    backends()
    gc.freeze()


class Within(Executor):
    """An executor whose jobs are measured as they are waited for."""

    def warm(self, jobs: int) -> None:
        pass

    def submit(self, job: AnyJob) -> None:
        self._busy.append(job)  # type: ignore[arg-type]

    def wait(self, timeout_s: float | None = None) -> tuple[AnyJob, Outcome]:
        job: AnyJob = self._busy.pop()  # type: ignore[assignment]
        return job, worker.measure(job, lambda kind, content: None)

    def close(self) -> None:
        pass

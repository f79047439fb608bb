"""Worlds of real processes over gloo: started once a size, forked from one that has imported torch, for many cases.

A case is a top-level function ``case(rank, size, *arguments)`` of a module under ``tests/``; what it returns or raises
comes back from every rank. Between cases the ranks wait; after a failure of one rank the world is started anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ... import forked

VARIABLES = "DMUON_TUNE_"  # those of the caller hold for a case
TIMEOUT_S = 60.0  # of a case, until its ranks are asked for their stacks and killed
GRACE_S = 5.0  # that the others have when one rank has failed, if the case is to succeed


@dataclass(frozen=True)
class Outcome:
    """How a case ended on one rank: ``ok`` with its value, ``raised``, ``died`` with an exit code, or ``hung``.

    ``error`` is the exception's last line, ``details`` its traceback or the stacks; ``output`` is what it printed.
    """

    status: str
    value: Any = None
    error: str = ""
    details: str = ""
    output: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


class World:
    """``size`` processes of one gloo group; ``run`` for a case that succeeds, ``outcomes`` for one that may not."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def run(self, case: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_S) -> list[Any]:
        """What ``case(rank, size, *arguments)`` returns, rank by rank; else AssertionError with every reason."""
        found = self.outcomes(case, *arguments, timeout=timeout, grace=GRACE_S)
        failed = [f"rank {rank} of {self.size} {outcome.status}: {outcome.details or outcome.error}\n{outcome.output}"
                  for rank, outcome in enumerate(found) if outcome.status != "ok"]
        # The rank that raised first says more than those that waited for it.
        assert not failed, "\n".join(sorted(failed, key=lambda text: " hung: " in text.partition("\n")[0]))
        return [outcome.value for outcome in found]

    def outcomes(
        self, case: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_S, grace: float | None = None
    ) -> list[Outcome]:
        """How the case ends on every rank; ``grace``: seconds for the others once one has failed (default: timeout)."""
        if not self._processes:
            self._start()
        variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
        order = pickle.dumps((case.__module__, case.__qualname__, arguments, variables))
        began = time.monotonic()
        for pipe in self._pipes:
            pipe.send_bytes(order)
        found = self._collect(began + timeout, grace)
        if any(outcome.status != "ok" for outcome in found.values()):
            self.close()  # their collectives may be out of step
        return [found[rank] for rank in range(self.size)]

    def _collect(self, deadline: float, grace: float | None) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        while len(found) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                found[rank] = outcome = self._outcome(rank)
                if outcome.status != "ok" and grace is not None:
                    deadline = min(deadline, time.monotonic() + grace)
            if not ready:
                found.update({rank: self._stacks(rank) for rank in waiting.values()})
        return found

    def _outcome(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self._pipes[rank].recv_bytes())
            return outcome
        except EOFError:
            process = self._processes[rank]
            process.join(5)
            return Outcome("died", error=f"exit code {process.exitcode}", output=self._printed(rank),
                           exitcode=process.exitcode)

    def _stacks(self, rank: int) -> Outcome:
        """Every thread's stack of a rank that does not answer, which is then killed."""
        process = self._processes[rank]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        process.kill()
        process.join(5)
        printed = self._printed(rank)
        return Outcome("hung", error="no answer within the timeout", details=printed, output=printed)

    def _printed(self, rank: int) -> str:
        return (self._folder / f"{rank}.log").read_text(errors="replace")

    def _start(self) -> None:
        from torch.distributed import TCPStore

        context = forked.context()
        self._scratch = tempfile.TemporaryDirectory(prefix="dmuon-tune-world-")
        self._folder = Path(self._scratch.name)
        # Here, as under torchrun, not on rank 0: any rank may die. The system chooses a free port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self._store.port, theirs, str(self._folder)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """End the processes; the next case starts others."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(10)
        if self._processes:
            self._scratch.cleanup()
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, port: int, pipe: connection.Connection, folder: str) -> None:
    """One rank: a group, then case after case until the pipe closes."""
    forked.settle()
    log = open(Path(folder, f"{rank}.log"), "w+b", buffering=0)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = io.TextIOWrapper(log, line_buffering=True)
    faulthandler.register(signal.SIGUSR1, file=log.fileno(), all_threads=True)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this machine's name may lead nowhere
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
                      WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    store = distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            module, name, arguments, variables = pickle.loads(pipe.recv_bytes())
            for variable in [known for known in os.environ if known.startswith(VARIABLES)]:
                del os.environ[variable]
            os.environ.update(variables)
            log.truncate(0)
            log.seek(0)
            outcome = _answer(getattr(importlib.import_module(module), name), rank, size, arguments)
            printed = Path(folder, f"{rank}.log").read_text(errors="replace")
            pipe.send_bytes(pickle.dumps(Outcome(**{**outcome, "output": printed})))
    os._exit(0)  # without the destructors of groups whose other ranks may be gone


def _answer(case: Callable[..., Any], rank: int, size: int, arguments: Sequence[Any]) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    began = time.monotonic()
    try:
        value = case(rank, size, *arguments)
        return {"status": "ok", "value": value, "seconds": time.monotonic() - began}
    except BaseException as error:
        last = "".join(traceback.format_exception_only(error)).strip()
        return {"status": "raised", "error": last, "details": traceback.format_exc(),
                "seconds": time.monotonic() - began}


class Worlds:
    """``worlds(size)``: the world of that size, started at its first case."""

    def __init__(self) -> None:
        self._known: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        return self._known.setdefault(size, World(size))

    def __iter__(self) -> Iterator[World]:
        return iter(self._known.values())

    def close(self) -> None:
        for world in self:
            world.close()

"""Shapes of bench_ns prepared in several processes at once; a method that hangs or kills one fails alone."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from _bench_methods import methods

from dmuon_tune.recipe import Group

READY = "ready"
PREPARE_S = 300.0  # for one method of one shape; torch.compile takes the longest, about a minute beside others
START_S = 300.0  # until a process begins its first method: imports, on a busy host
TIME_S = 600.0  # for all methods of one shape

Row = tuple[dict[str, dict[str, Any]], dict[str, str]]  # a shape's results, and its inputs without a reference
LeftOut = dict[int, dict[str, str]]  # a process's shape, by place → methods that failed before, and why
Serve = Callable[[Connection, list[Group], argparse.Namespace, LeftOut], None]


class Worker:
    """A process with some of the shapes. Where a method hangs or kills it, another one begins anew without that.

    ``serve`` sends (shape's place, method) before what may hang, (place, "") before what is no method's, then READY.
    """

    def __init__(self, groups: list[Group], options: argparse.Namespace, serve: Serve) -> None:
        self._groups, self._options, self._serve = groups, options, serve
        self._left_out: LeftOut = {}
        self.ready = False
        self.lost = ""  # why there is no process any more
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        arguments = (there, self._groups, self._options, self._left_out)
        self.process = context.Process(target=self._serve, args=arguments, daemon=True)
        self.process.start()
        there.close()
        self._doing, self._limit_s, self._since = (0, ""), START_S, time.monotonic()

    def advance(self) -> None:
        """Take what was sent; give up a process that ended or that has been too long at one method."""
        try:
            while not self.ready and self.pipe.poll():
                message = self.pipe.recv()
                self.ready = message == READY
                if not self.ready:
                    self._doing, self._since = message, time.monotonic()
                    self._limit_s = self._options.prepare_timeout if message[1] else TIME_S
        except (EOFError, OSError):
            self.process.join()
            self._give_up(f"its process ended with exit code {self.process.exitcode}")
            return
        if not self.ready and time.monotonic() - self._since > self._limit_s:
            self._give_up(f"still not prepared after {self._limit_s:g} s")

    def _give_up(self, reason: str) -> None:
        self.end()
        place, method = self._doing
        if not method:
            self.lost = reason
            return
        self._left_out.setdefault(place, {})[method] = reason
        self._start()

    def timed(self) -> Row | None:
        """The next shape's figures; None where the process is lost."""
        try:
            if not self.lost:
                self.pipe.send("time")
                if self.pipe.poll(TIME_S):
                    row: Row = self.pipe.recv()
                    return row
                self.lost = f"still not timed after {TIME_S:g} s"
        except (EOFError, OSError):
            self.lost = "the process that timed it ended"
        self.end()
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def side_by_side(groups: list[Group], options: argparse.Namespace, serve: Serve) -> Iterator[Row]:
    """Shapes prepared in several processes at once, then timed one after another with the device to themselves."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    workers = [Worker(groups[turn :: options.workers], options, serve) for turn in range(options.workers)]
    while preparing := [worker for worker in workers if not worker.ready and not worker.lost]:
        wait([worker.pipe for worker in preparing], timeout=1.0)
        for worker in preparing:
            worker.advance()
    for index in range(len(groups)):
        worker = workers[index % options.workers]
        row = worker.timed()
        yield row or ({key: {"label": methods("cuBLAS")[key][0], "failed": worker.lost} for key in options.methods}, {})
    for worker in workers:
        worker.process.join()

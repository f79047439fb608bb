"""The ranks of bench_train, a model's training on them, and the clocks of its steps."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _bench_model import Decoder
from _bench_timing import ranges_us, spread, synchronize
from _bench_variants import Variant
from torch import Tensor

from dmuon_tune.backends.probe import resolve
from dmuon_tune.errors import UsageError
from dmuon_tune.recipe import Group
from dmuon_tune.runtime.ownership import Assignment
from dmuon_tune.words import counted

PROGRAM = "bench_train"
WARM_UP = 4  # the first compiles, the second captures, and what allocates does so by then
RANGE_STEPS = 5  # whose ranges are timed
OWNED = ("momentum", "chain", "update")  # ranges of what an owner does for its matrices; their exchange is apart
TIMEOUT_S = 600.0  # of a collective: the first step may compile


@dataclass(frozen=True)
class World:
    """The ranks of this run, one device each."""

    store: dist.Store
    rank: int
    size: int

    @classmethod
    def joined(cls) -> World:
        """As torchrun started them."""
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))
        return cls(dist.PrefixStore(PROGRAM, store), rank, size)

    def start(self, asked: str) -> torch.device:
        """This rank's device, with the process group of all ranks."""
        kind, local = torch.device(resolve(asked)).type, int(os.environ["LOCAL_RANK"])
        if kind == "cuda" and local >= torch.cuda.device_count():
            raise UsageError(f"{counted(torch.cuda.device_count(), 'GPU')} here; give that as --nproc-per-node")
        device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo", store=self.store, rank=self.rank, world_size=self.size,
            timeout=timedelta(seconds=TIMEOUT_S), device_id=device if kind == "cuda" else None,
        )
        return device

    def settle(self) -> None:
        """Wait for all work of all ranks."""
        synchronize()
        dist.barrier()
        synchronize()

    def all(self, value: Any) -> list[Any]:
        """Every rank's."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def first_to_fail(self) -> bool:
        """Whether no rank has asked this before: that one says why."""
        return self.store.add("failures", 1) == 1


@dataclass
class Training:
    """One variant on its model: steps, and the losses on this rank."""

    model: Decoder
    variant: Variant
    batch: Callable[[], Tensor]
    losses: list[Tensor] = field(default_factory=list)

    def parts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        loss: Tensor

        def forward() -> None:
            nonlocal loss
            loss = self.model(self.batch())
            self.losses.append(loss.detach())

        yield "forward", forward
        yield "backward", lambda: self.variant.backward(loss)
        yield "optimizer", self.update

    def update(self) -> None:
        self.variant.step()
        self.model.zero_grad(set_to_none=True)

    def step(self) -> None:
        for _, work in self.parts():
            work()


def timed_us(world: World, work: Callable[[], Any]) -> float:
    """Until this rank's work is done; all ranks begin together."""
    world.settle()
    begin = time.perf_counter()
    work()
    synchronize()
    return (time.perf_counter() - begin) * 1e6


def phases_us(world: World, training: Training, steps: int) -> dict[str, float]:
    """Phase → median over steps of the slowest rank's microseconds."""
    own: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        for name, work in training.parts():
            own[name].append(timed_us(world, work))
    every = world.all(dict(own))
    return {name: median(map(max, zip(*(found[name] for found in every), strict=True))) for name in own}


def free_us(world: World, training: Training, steps: int) -> list[float]:
    """Microseconds of each step in a row that is waited for at its end, on the rank that took longest."""
    cuda = next(training.model.parameters()).device.type == "cuda"

    def now() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    world.settle()
    marks = [now()]
    for _ in range(steps):
        training.step()
        marks.append(now())
    synchronize()
    own = [
        begin.elapsed_time(end) * 1e3 if cuda else (end - begin) * 1e6
        for begin, end in zip(marks, marks[1:], strict=False)
    ]
    slowest: list[float] = max(world.all(own), key=sum)
    return slowest


def measure(world: World, training: Training, steps: int) -> dict[str, Any]:
    """All figures of one variant, the same on every rank; none of its steps may have been run."""
    device = next(training.model.parameters()).device
    first = phases_us(world, training, 1)
    for _ in range(WARM_UP - 1):
        training.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    phases = phases_us(world, training, steps)
    free = free_us(world, training, steps)
    variant = training.variant
    inside = world.all(ranges_us(training.step, device, RANGE_STEPS))
    losses = world.all([float(loss) for loss in training.losses])
    world.settle()
    owned = variant.ownership(device)
    return {
        **spread(free), "phases_us": phases, "first_us": first,
        "peak_bytes": max(world.all(torch.cuda.max_memory_allocated(device))) if device.type == "cuda" else None,
        "sent_bytes": sum(world.all(variant.sent_bytes())), "runs": sum(world.all(variant.runs())),
        "ranges_us": {name: max(found.get(name, 0.0) for found in inside) for found in inside for name in found},
        "ownership": None if owned is None else ownership(owned[0], world.all(owned[1]), inside),
        "losses": [sum(found) / world.size for found in zip(*losses, strict=True)],
    }


def ownership(
    assignment: Assignment, alone: list[dict[Group, tuple[int, float]]], inside: list[dict[str, float]]
) -> dict[str, Any]:
    """Every owner's time, by rank: as it was predicted, its batches alone, and their ranges inside a step."""
    return {
        "method": assignment.method, "bound_us": assignment.bound_us, "gap": assignment.gap,
        "predicted_us": list(assignment.loads_us),
        "alone_us": [sum(count * us for count, us in its.values()) for its in alone],
        "inside_us": [sum(found.get(name, 0.0) for name in OWNED) for found in inside],
        "batches": [
            {group.label(): {"count": count, "alone_us": us} for group, (count, us) in its.items()} for its in alone
        ],
    }

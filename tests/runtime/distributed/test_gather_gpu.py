"""Shards on GPUs: streams that overlap leave no bit to chance, and weights are one process's within half precision.

Where there is one GPU, two ranks share it: copies carry all of it then, which NCCL does not between such ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon_tune.runtime import Muon
from dmuon_tune.runtime.distributed.neighbours import VARIABLE

from ..reference import gaussian

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPUS = torch.cuda.device_count()
SIZE = min(4, GPUS) if GPUS > 1 else 2
STEPS = 12
# Rounds in plenty, of several shapes, by the library's fp32 products, which nobody compiles; and our kernels, which are
# compiled, in three batches: two matrices, one that is left over, an odd one.
MANY = [(256, 512)] * 6 + [(512, 256)] * 5 + [(100, 77), (300, 1024), (1024, 300)]
FEW = [(264, 520)] * 6 + [(100, 72)]


@dataclass(frozen=True)
class Case:
    """``buckets``: bytes of a round's batch, training by training, of which the second is carried by NCCL; ``far``: how
    far weights may be from one process's, over the length of the way."""

    shapes: list[tuple[int, int]]
    dtype: torch.dtype
    ns_dtype: str
    buckets: tuple[int, ...]
    far: float


CASES = {
    "library": Case(MANY, torch.float32, "float32", (2**20, 2**20, 2**28), 0.01),
    # An update is 0.02 times a matrix whose rows have a norm near 1; fp16 chains differ by a few per cent.
    "kernels": Case(FEW, torch.bfloat16, "float16", (600_000, 600_000), 0.1),
}


def model(case: Case) -> nn.Module:
    layers = [nn.Linear(cols, rows, bias=False, dtype=case.dtype, device="cuda") for rows, cols in case.shapes]
    with torch.no_grad():
        for index, layer in enumerate(layers):
            layer.weight.copy_(gaussian(*layer.weight.shape, seed=index) / 8)
    return nn.Sequential(*layers)


def gradient(p: Tensor, index: int, step: int) -> Tensor:
    whole = gaussian(*p.shape, seed=100 * step + index).to("cuda", p.dtype)
    if not isinstance(p, DTensor):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def trained(whole: nn.Module, **options: Any) -> list[Tensor]:
    return moved(whole, Muon(whole, weight_decay=0.1, verbose=False, **options))


def moved(whole: nn.Module, optimizer: Muon) -> list[Tensor]:
    for step in range(STEPS):
        for index, p in enumerate(whole.parameters()):
            p.grad = gradient(p, index, step)
        optimizer.step()
        optimizer.zero_grad()
    return [held(p).detach().cpu() for p in whole.parameters()]


def held(p: Tensor) -> Tensor:
    """All of a parameter, on the CPU where ranks share a GPU: gloo gathers no shards of GPUs."""
    if not isinstance(p, DTensor):
        return p
    if distributed.get_backend() == "nccl":
        return p.full_tensor()
    shards: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(shards, p.to_local().detach().cpu())
    return torch.cat(shards)


def join(rank: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank % GPUS)
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group("nccl" if size <= GPUS else "gloo", store=store, rank=rank, world_size=size)


def sharded(case: Case) -> nn.Module:
    whole = model(case)
    for layer in whole:
        fully_shard(layer)
    return whole


def rank_of_world(rank: int, size: int, folder: str, case: Case) -> None:
    join(rank, size, folder)
    found = []
    for training, bucket_bytes in enumerate(case.buckets):
        os.environ[VARIABLE] = str(int(training != 1 or size > GPUS))
        found.append(trained(sharded(case), ns_dtype=case.ns_dtype, bucket_bytes=bucket_bytes))
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rounds_on_streams_of_their_own(tmp_path: Path, case: Case) -> None:
    multiprocessing.spawn(rank_of_world, (SIZE, str(tmp_path), case), nprocs=SIZE)
    alone = trained(model(case), ns_dtype="float32")
    for rank in range(SIZE):
        first, again, *large = torch.load(tmp_path / f"{rank}.pt")
        assert all(map(torch.equal, first, again))
        for found in (first, *large):
            for one, want in zip(found, alone, strict=True):
                far = (one.float() - want.float()).norm() / (STEPS**0.5 * 0.02 * min(want.shape) ** 0.5)
                assert far < case.far, far


def carried(rank: int, size: int, folder: str) -> None:
    """Weights, and how many neighbours carried, where copies do and where NCCL does between rank 0 and the others."""
    join(rank, size, folder)
    found = []
    for apart in (0, 1):
        os.environ[VARIABLE] = str(int(rank >= apart))
        whole = sharded(CASES["library"])
        optimizer = Muon(whole, weight_decay=0.1, verbose=False, ns_dtype="float32", bucket_bytes=2**20)
        weights = moved(whole, optimizer)
        neighbours = optimizer._gather._pipeline._exchange._neighbours  # type: ignore[union-attr]
        found.append((len(neighbours.others), weights))
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.skipif(GPUS < 3, reason="fewer than three CUDA devices")
def test_one_rank_without_copies_changes_no_bit(tmp_path: Path) -> None:
    multiprocessing.spawn(carried, (SIZE, str(tmp_path)), nprocs=SIZE)
    for rank in range(SIZE):
        (all_near, copied), (near, both) = torch.load(tmp_path / f"{rank}.pt")
        assert (all_near, near) == (SIZE - 1, SIZE - 2 if rank else 0)
        assert all(map(torch.equal, copied, both))

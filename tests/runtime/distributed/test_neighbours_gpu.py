"""Copies between GPUs arrive whole and in order, whatever else runs on them; where there is one GPU, ranks share it."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

from dmuon_tune.errors import PeerError
from dmuon_tune.runtime.distributed.control import Control
from dmuon_tune.runtime.distributed.gpu_memory import GpuMemory
from dmuon_tune.runtime.distributed.neighbours import Neighbours

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPUS = torch.cuda.device_count()
ROOMS, TRANSFERS = 4, 200


def started(rank: int, size: int, folder: str, timeout: float) -> tuple[Control, Neighbours]:
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    control = Control(timeout=timeout)
    neighbours = Neighbours(control, GpuMemory(device), ROOMS)
    assert sorted(neighbours.others) == [other for other in range(size) if other != rank]
    return control, neighbours


def traded(rank: int, size: int, folder: str) -> None:
    """Transfers of up to 16 MB, each from what a product has just written into a room that another has just read."""
    _, neighbours = started(rank, size, folder, 60.0)
    rng, rooms = random.Random(0), dict[int, torch.Tensor]()
    busy, most = torch.randn(2048, 2048, device="cuda"), 2**22
    out = [torch.empty(size * most, dtype=torch.int32, device="cuda") for _ in range(ROOMS)]
    sums, wanted = list[torch.Tensor](), list[int]()
    for number in range(TRANSFERS):
        room = number % ROOMS
        sizes = [[0 if to == of else rng.choice((0, 1, 4096, most)) for of in range(size)] for to in range(size)]
        rooms |= neighbours.reserve([4 * sum(sizes[rank]) if room == each else 0 for each in range(ROOMS)])
        busy @ busy
        starts = list(accumulate((sizes[to][rank] for to in range(size)), initial=0))
        for to in range(size):
            out[room][starts[to] : starts[to + 1]].fill_(number * size + rank)
        sends = [(to, 4 * sum(sizes[to][:rank]), out[room].data_ptr() + 4 * starts[to], 4 * sizes[to][rank])
                 for to in range(size) if sizes[to][rank]]
        neighbours.post(room, sends, [of for of in range(size) if sizes[rank][of]], f"transfer {number}").wait()
        for of, start in enumerate(list(accumulate(sizes[rank], initial=0))[:-1]):
            if sizes[rank][of]:
                arrived = rooms[room].view(torch.int32)[start : start + sizes[rank][of]]
                sums.append((arrived == number * size + of).sum())
                wanted.append(sizes[rank][of])
    assert torch.stack(sums).tolist() == wanted
    distributed.barrier()


def test_what_arrives_is_what_was_sent(tmp_path: Path) -> None:
    size = min(4, GPUS) if GPUS > 1 else 3
    multiprocessing.spawn(traded, (size, str(tmp_path)), nprocs=size)


def dropped(rank: int, size: int, folder: str) -> None:
    """Rank 1 drops its neighbours before rank 0 posts what it waits for; the current device is not everyone's own."""
    _, neighbours = started(rank, size, folder, 20.0)
    torch.cuda.set_device(0)
    rooms = neighbours.reserve([64] * ROOMS)
    given = torch.full((64,), rank + 1, dtype=torch.uint8, device=f"cuda:{rank % GPUS}")
    if rank == 0:
        time.sleep(1.0)
    neighbours.post(0, [(1 - rank, 0, given.data_ptr(), 64)], [1 - rank], "updates").wait()
    arrived = rooms[0].clone()
    if rank == 1:
        del neighbours
        gc.collect()
    assert arrived.tolist() == [2 - rank] * 64
    distributed.barrier()
    if rank == 0:  # what the one that made it has freed
        neighbours._needed.close(neighbours.others[1].rooms.pop(0))


def test_what_is_under_way_arrives_after_an_optimizer_is_gone(tmp_path: Path) -> None:
    multiprocessing.spawn(dropped, (2, str(tmp_path)), nprocs=2)


def left_alone(rank: int, size: int, folder: str, how: str) -> None:
    control, neighbours = started(rank, size, folder, 4.0)
    neighbours.reserve([64] * ROOMS)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(8.0)
        return
    neighbours.post(0, [], [1], "gradients of round 0").wait()
    one = torch.ones(1, device="cuda")
    began = time.monotonic()
    waited: Any = (one + 1).item()  # as a loss is read: the stream waits for what does not come
    assert waited == 2 and time.monotonic() - began < 7
    with pytest.raises(PeerError):
        control.agree("step")
    Path(folder, "said").write_text(control.failure())


@pytest.mark.parametrize("how", ["late", "killed"])
def test_no_wait_is_without_end(tmp_path: Path, how: str) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=left_alone, args=(rank, 2, str(tmp_path), how)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert ranks[0].exitcode == 0
    assert "gradients of round 0" in (tmp_path / "said").read_text()

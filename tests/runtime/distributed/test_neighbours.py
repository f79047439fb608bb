"""Ranks that write into each other's memory: what arrives is what was sent, and no wait is without end."""

from __future__ import annotations

import gc
import os
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from dmuon_tune.errors import PeerError
from dmuon_tune.runtime.distributed import exchange
from dmuon_tune.runtime.distributed.control import Control
from dmuon_tune.runtime.distributed.flags import FLAGS_FOLDER
from dmuon_tune.runtime.distributed.neighbours import VARIABLE, Neighbours

from .cases import Held, Steps, alone, assert_equal, moved
from .host_memory import MUCH_BYTES, HostMemory
from .world import Worlds

ROOMS, TRANSFERS = 2, 60


def traded(rank: int, size: int, seed: int) -> list[int]:
    """Random transfers, some empty, of which rooms of their size are made on the way; the bytes copied."""
    memory = HostMemory()
    neighbours = Neighbours(Control(), memory, ROOMS)
    assert sorted(neighbours.others) == [other for other in range(size) if other != rank]
    rng, rooms = random.Random(seed), dict[int, torch.Tensor]()
    for number in range(TRANSFERS):
        room = number % ROOMS
        sizes = [[0 if to == of else rng.choice((0, 1, 7, 300 * number)) for of in range(size)] for to in range(size)]
        rooms |= neighbours.reserve([sum(sizes[rank]) if room == each else 0 for each in range(ROOMS)])
        given = [torch.full((sizes[to][rank],), (number + rank) % 256, dtype=torch.uint8) for to in range(size)]
        sends = [(to, sum(sizes[to][:rank]), given[to].data_ptr(), len(given[to])) for to in range(size)
                 if len(given[to])]
        neighbours.post(room, sends, [of for of in range(size) if sizes[rank][of]], f"transfer {number}").wait()
        for of, start in enumerate(list(accumulate(sizes[rank], initial=0))[:-1] if sum(sizes[rank]) else []):
            assert (rooms[room][start : start + sizes[rank][of]] == (number + of) % 256).all(), (number, of)
    return [memory.copied, neighbours._waits._number]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_arrives_is_what_was_sent(worlds: Worlds, size: int) -> None:
    found = worlds(size).run(traded, size)
    assert len({number for _, number in found}) == 1
    assert all(copied for copied, _ in found)


def moved_by_copies(rank: int, size: int, layout: str, plan: Steps) -> tuple[int, Held]:
    """As ``moved``, and the bytes that this rank has copied."""
    memory, made = HostMemory(), exchange.memory_of
    exchange.memory_of = lambda device: memory  # type: ignore[assignment,return-value]
    try:
        held = moved(rank, size, layout, plan)
    finally:
        exchange.memory_of = made
    return memory.copied, held


@pytest.mark.parametrize(("size", "layout"), [(2, "fsdp"), (4, "hsdp"), (4, "tp")])
def test_a_step_is_the_same(worlds: Worlds, size: int, layout: str) -> None:
    plan = Steps(steps=6, options={"bucket_bytes": 5000})
    found = worlds(size).run(moved_by_copies, layout, plan)
    assert all(copied for copied, _ in found)
    assert_equal(plan, [held for _, held in found], alone(plan), f"{layout} on {size}")


def excluded(rank: int, size: int, how: str) -> list[Any]:
    memory = HostMemory(how) if rank == 1 else HostMemory()
    neighbours = Neighbours(Control(), None if how == "none" and rank == 1 else memory, ROOMS)
    return [sorted(neighbours.others), neighbours.anywhere, list(neighbours.reserve([10] * ROOMS))]


def test_a_rank_without_memory_for_others_leaves_them_to_each_other(worlds: Worlds) -> None:
    assert worlds(3).run(excluded, "none") == [[[2], True, [0, 1]], [[], True, []], [[0], True, [0, 1]]]


@pytest.mark.parametrize("how", ["open", "copy"])
def test_where_one_cannot_write_none_does(worlds: Worlds, how: str) -> None:
    assert worlds(3).run(excluded, how) == [[[], False, []]] * 3


def test_the_variable_turns_it_off(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert worlds(2).run(excluded, "") == [[[], False, []]] * 2


def left_alone(rank: int, size: int, how: str) -> tuple[str, float]:
    """What the rank that waits is told, and after how long; the other one does not come."""
    control = Control(timeout=3.0 if how == "late" else 60.0)
    neighbours = Neighbours(control, HostMemory(), ROOMS)
    neighbours.reserve([8, 8])
    began = time.monotonic()
    if rank == 1:
        if how == "failed":
            control.fail("out of memory")
        return "", 0.0
    neighbours.post(0, [], [1], "gradients of round 3").wait()
    waited = time.monotonic() - began
    with pytest.raises(PeerError) as raised:
        control.agree("step")
    return str(raised.value), waited


@pytest.mark.parametrize(("how", "said"), [
    ("late", "waited 3 s for gradients of round 3, step 0; not arrived: rank 1"), ("failed", "out of memory"),
])
def test_no_wait_is_without_end(worlds: Worlds, how: str, said: str) -> None:
    (found, waited), _ = worlds(2).run(left_alone, how)
    assert said in found and waited < 4.5, (found, waited)


def trade(neighbours: Neighbours, rooms: dict[int, torch.Tensor], rank: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A transfer between two ranks under way: its end, what is sent and where the other's arrives."""
    given = torch.full((8,), rank + 1, dtype=torch.uint8)
    place = neighbours.post(0, [(1 - rank, 0, given.data_ptr(), 8)], [1 - rank], "updates")
    return place, given, rooms[0]


def dropped(rank: int, size: int, forked: bool) -> list[int]:
    """What arrives where rank 1 drops its neighbours right after the post, and the other comes later; or a process that
    it has forked drops its copy of them, as a data loader's may."""
    neighbours = Neighbours(Control(timeout=20.0), HostMemory(), ROOMS)
    rooms = neighbours.reserve([8, 8])
    rooms[0].zero_()
    if rank == 0:
        time.sleep(0.5)
    place, _given, room = trade(neighbours, rooms, rank)
    child = os.fork() if forked else 0
    if rank == 1 and not child:
        del neighbours
        gc.collect()
    if forked:
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    place.wait()
    return room.tolist()


@pytest.mark.parametrize("forked", [False, True], ids=["gone", "forked"])
def test_what_is_under_way_arrives_after_an_optimizer_is_gone(worlds: Worlds, forked: bool) -> None:
    assert worlds(2).run(dropped, forked) == [[2] * 8, [1] * 8]


def without_store(rank: int, size: int) -> str:
    """What later calls are told once a wait was ended because the store is gone, as with the rank that kept it."""
    control = Control(timeout=20.0)
    neighbours = Neighbours(control, HostMemory(), ROOMS)
    rooms = neighbours.reserve([8, 8])
    if rank == 1:
        return ""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    control._store = PrefixStore("gone", TCPStore("127.0.0.1", kept.port))
    del kept
    trade(neighbours, rooms, rank)[0].wait()
    with pytest.raises(PeerError) as raised:
        trade(neighbours, rooms, rank)
    return str(raised.value)


def test_nobody_goes_on_with_what_has_not_arrived(worlds: Worlds) -> None:
    assert "the store does not answer" in worlds(2).run(without_store)[0]


def crowded(rank: int, size: int) -> list[str]:
    """What both ranks are told where one has no memory for a larger room, then and later."""
    control = Control()
    neighbours = Neighbours(control, HostMemory("much" if rank == 1 else ""), ROOMS)
    rooms, said = neighbours.reserve([8, 8]), []
    for call in (lambda: neighbours.reserve([2 * MUCH_BYTES, 8]), lambda: trade(neighbours, rooms, rank)):
        with pytest.raises((OSError, PeerError)) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_rooms_half_made_are_used_no_more(worlds: Worlds) -> None:
    for said in worlds(2).run(crowded):
        assert all("no memory" in each for each in said), said


def leftovers(rank: int, size: int) -> list[str]:
    neighbours = Neighbours(Control(), HostMemory(), ROOMS)
    neighbours.reserve([100, 100])
    del neighbours
    gc.collect()
    time.sleep(0.2)
    return [path.name for path in Path(FLAGS_FOLDER).glob("dmuon-tune-*")]


def test_nothing_is_left(worlds: Worlds) -> None:
    before = {path.name for path in Path(FLAGS_FOLDER).glob("dmuon-tune-*")}
    assert set(worlds(2).run(leftovers)[0]) <= before

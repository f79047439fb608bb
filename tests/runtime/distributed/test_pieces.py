"""Where pieces of matrices lie, against PyTorch's own sharding; rounds, and the way of every element in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby, permutations
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dmuon_tune.errors import UsageError
from dmuon_tune.recipe import Group
from dmuon_tune.runtime.blocks import Blocks
from dmuon_tune.runtime.distributed.exchange import Parcel, Transfer, to_holders, to_owners
from dmuon_tune.runtime.distributed.pieces import (
    Layout,
    Matrix,
    cut,
    cuts_of,
    holdings,
    local_shape,
    matrices_of,
    mesh_of,
    shard_of,
)
from dmuon_tune.runtime.distributed.rounds import Item, Round, rounds
from dmuon_tune.runtime.ownership.pricing import flops

Where = Callable[[int, Parcel], Tensor]  # a rank's view of a parcel
MESHES = [(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]


@contextmanager
def fake(rank: int, size: int) -> Iterator[None]:
    """A process group of which this is one rank, and no other is there."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def numbered(*shape: int) -> Tensor:
    return torch.arange(prod(shape)).view(shape)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    mesh_shape = draw(st.sampled_from(MESHES))
    along = st.tuples(st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3]))
    cuts = tuple(draw(st.one_of(st.none(), along)) for _ in mesh_shape)
    return Layout(shape, (tuple(range(prod(mesh_shape))),), mesh_shape, cuts)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.data())
def test_every_rank_holds_what_pytorch_gives_it(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(layout.meshes[0]))
    placements = [
        Replicate() if along is None else Shard(along[0]) if along[1] == 1 else
        _StridedShard(along[0], split_factor=along[1]) for along in layout.cuts
    ]
    with fake(rank, len(layout.meshes[0])):
        mesh = init_device_mesh("cpu", layout.mesh_shape)
        tensor = distribute_tensor(numbered(*layout.shape), mesh, placements, src_data_rank=None)
        assert mesh_of(tensor, distributed.group.WORLD) == (layout.meshes[0], layout.mesh_shape)
        assert cuts_of(tensor) == layout.cuts
        held = holdings(layout)[rank]
        assert torch.equal(shard_of(numbered(*layout.shape), held), tensor.to_local())
        assert local_shape(held) == tuple(tensor.to_local().shape)


@pytest.mark.parametrize("rank", range(8))
def test_fsdp2_shards_what_tensor_parallelism_has_cut_unevenly(rank: int) -> None:
    with fake(rank, 8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tensor"))
        model = nn.Sequential(nn.Linear(4, 9, bias=False))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
        weight = model[0].weight
        layout = Layout((9, 4), (tuple(range(8)),), (4, 2), cuts_of(weight))
        found = holdings(layout, later_first=True)
        assert local_shape(found[rank]) == tuple(weight.to_local().shape)
        assert found != holdings(layout)  # which is what the placements say


def blocks_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Blocks:
    """Itself, its experts, or cut, or flattened."""
    order: tuple[int, ...] = ()
    if len(shape) == 3 and draw(st.booleans()):
        order = (0, *draw(st.permutations([1, 2])))
    dim = draw(st.sampled_from([-2] if order else [-2, -1]))
    extent = shape[0] if order else shape[dim]
    first = draw(st.integers(0, extent - 1))
    return Blocks(order, (first, extent - first) if first else (), dim)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Layout], list[Blocks], list[Matrix], list[int]]:
    """Parameters on one mesh, or whole on all ranks, or on one mesh for each half of them; and owners."""
    first = draw(layouts())
    size = prod(first.mesh_shape)
    found = [first, Layout((4, 3), (tuple(range(size)),), (size,), (None,))]
    if size % 2 == 0:
        ranks = tuple(range(size))
        found.append(Layout((5, 3), (ranks[::2], ranks[1::2]), (size // 2,), ((0, 1),)))
    ways = [blocks_in(draw, layout.shape) for layout in found]
    matrices = [
        matrix for index, (layout, blocks) in enumerate(zip(found, ways, strict=True))
        for matrix in matrices_of(index, layout, blocks, "w", False)
    ]
    return found, ways, matrices, [draw(st.integers(0, size - 1)) for _ in matrices]


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from([1, 100, 10**6]))
def test_every_element_goes_to_the_owner_and_back(
    model: tuple[list[Layout], list[Blocks], list[Matrix], list[int]], bucket_bytes: int
) -> None:
    layouts, ways, matrices, owners = model
    size = len([rank for mesh in layouts[0].meshes for rank in mesh])
    whole = [numbered(*layout.shape) + 1000 * index for index, layout in enumerate(layouts)]
    local = [[shard_of(each, holdings(layout)[rank]) for each, layout in zip(whole, layouts, strict=True)]
             for rank in range(size)]
    returned = [[torch.zeros_like(part) for part in parts] for parts in local]
    wanted = [part for each, blocks in zip(whole, ways, strict=True) for part in blocks.of(each)]
    items = [Item(place, "lane", matrix.rows, matrix.cols, owners[place], 4 * matrix.rows * matrix.cols)
             for place, matrix in enumerate(matrices)]
    for one in rounds(items, size, bucket_bytes):
        at_owners = {place: torch.zeros(matrices[place].rows, matrices[place].cols, dtype=torch.int64)
                     for batch in one.batches for place in batch}
        boxed = {place: matrices[place].boxed(each) for place, each in at_owners.items()}

        def held(where: list[list[Tensor]], rank: int, part: Parcel) -> Tensor:
            return cut(where[rank][matrices[part.matrix].parameter], part.fragment.local)

        def owned(boxed: dict[int, Tensor], _: int, part: Parcel) -> Tensor:
            return cut(boxed[part.matrix], part.fragment.place)

        inward = [to_owners(one, matrices, rank) for rank in range(size)]
        carried(inward, partial(held, local), partial(owned, boxed))
        for place, matrix in at_owners.items():
            assert torch.equal(matrix, wanted[place])
            assert torch.equal(matrices[place].flat(boxed[place]), matrix)
        outward = [to_holders(one, matrices, rank) for rank in range(size)]
        carried(outward, partial(owned, boxed), partial(held, returned))
    for rank in range(size):
        for part, back in zip(local[rank], returned[rank], strict=True):
            assert torch.equal(part, back)


def carried(transfers: list[Transfer], source: Where, target: Where) -> None:
    """Do what a collective and both of its ends do; nothing is sent that stays."""
    size = len(transfers)
    outs = []
    for rank, transfer in enumerate(transfers):
        out = torch.zeros(sum(transfer.send_sizes), dtype=torch.int64)
        for parcel in transfer.sends:
            out[parcel.start : parcel.start + parcel.fragment.numel] = source(rank, parcel).flatten()
        outs.append(out.split(list(transfer.send_sizes)))
        for parcel in transfer.kept:
            target(rank, parcel).copy_(source(rank, parcel))
    for rank, transfer in enumerate(transfers):
        into = torch.cat([outs[other][rank] for other in range(size)])
        assert transfer.receive_sizes == tuple(len(outs[other][rank]) for other in range(size))
        assert transfer.send_sizes[rank] == 0
        for parcel in transfer.receives:
            flat = into[parcel.start : parcel.start + parcel.fragment.numel]
            target(rank, parcel).copy_(flat.view(parcel.fragment.shape))
    assert {transfer.empty for transfer in transfers} == {not any(len(part) for out in outs for part in out)}


@st.composite
def items(draw: st.DrawFn) -> tuple[list[Item], int]:
    size = draw(st.integers(1, 5))
    kinds = st.sampled_from([("a", 2, 3), ("a", 3, 2), ("b", 2, 3), ("a", 8, 8)])
    found = []
    for place in range(draw(st.integers(0, 30))):
        lane, rows, cols = draw(kinds)
        found.append(Item(place, lane, rows, cols, draw(st.integers(0, size - 1)), 4 * rows * cols))
    return found, size


@settings(deadline=None)
@given(items(), st.sampled_from([1, 60, 10**6]))
def test_rounds_hold_every_matrix_once_in_batches_of_equal_ones(given: tuple[list[Item], int], bucket: int) -> None:
    listed, size = given
    found = rounds(listed, size, bucket)
    for one in found:
        assert len(one.batches) == size and any(one.batches)
        for owner, batch in enumerate(one.batches):
            some = [listed[place] for place in batch]
            assert {(each.lane, each.owner) for each in some} <= {(one.lane, owner)}
            assert len({(each.rows, each.cols) for each in some}) <= 1
            assert len(some) <= 1 or sum(each.nbytes for each in some) <= bucket
    assert sorted(place for one in found for batch in one.batches for place in batch) == list(range(len(listed)))
    # None is longer than its busiest owner needs, and each owner's longest batches come first.
    for lane, some in groupby(found, key=lambda one: one.lane):
        own = list(some)
        for owner in range(size):
            batches = [one.batches[owner] for one in own]
            work = [work_of(listed, batch) for batch in batches if batch]
            assert work == sorted(work, reverse=True)
            assert not any(later and not earlier for earlier, later in zip(batches, batches[1:], strict=False))
        assert sum(1 for one in found if one.lane == lane) == len(own)


def work_of(listed: Sequence[Item], batch: Sequence[int]) -> float:
    return sum(flops(Group(1, listed[place].rows, listed[place].cols)) for place in batch)


def test_batches_of_like_work_share_a_round() -> None:
    owned = [((64, 256), 1), ((48, 48), 20)], [((64, 256), 4), ((48, 48), 4)]
    every = [(shape, owner) for owner, some in enumerate(owned) for shape, count in some for _ in range(count)]
    listed = [Item(place, "lane", *shape, owner, shape[0] * shape[1]) for place, (shape, owner) in enumerate(every)]
    first, second = zip(*(one.batches for one in rounds(listed, 2, 2 * 64 * 256)), strict=True)
    assert (list(map(len, first)), list(map(len, second))) == ([10, 10, 1], [2, 2, 4])
    work, *others = (
        sum(max(work_of(listed, batch) for batch in one) for one in zip(first, order, strict=True))
        for order in permutations(second)
    )
    assert work == min(others) < max(others)


def test_a_piece_that_many_hold_is_sent_by_its_owner_or_the_next_one() -> None:
    layout = Layout((4, 6), (tuple(range(4)),), (2, 2), (None, (0, 1)))  # HSDP
    (matrix,) = matrices_of(0, layout, Blocks(), "w", False)
    upper, lower = matrix.pieces
    assert (upper.holders, lower.holders) == ((0, 2), (1, 3))
    assert [upper.sender(owner) for owner in range(4)] == [0, 0, 2, 2]
    assert [lower.sender(owner) for owner in range(4)] == [1, 1, 1, 3]


def test_columns_of_a_flattened_parameter_are_refused() -> None:
    layout = Layout((4, 3, 2), ((0, 1),), (2,), ((0, 1),))
    with pytest.raises(UsageError, match="w: a flattened parameter .* cannot be cut into columns"):
        matrices_of(0, layout, Blocks((0, 1, 2), (2, 4), -1), "w", False)


def test_a_round_of_one_rank_is_empty() -> None:
    layout = Layout((4, 3), ((0,),), (1,), ((0, 1),))
    (matrix,) = matrices_of(0, layout, Blocks(), "w", False)
    transfer: Transfer = to_owners(Round("lane", ((0,),)), [matrix], 0)
    assert transfer.empty and len(transfer.kept) == 1 and not transfer.sends

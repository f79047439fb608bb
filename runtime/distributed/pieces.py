"""Which part of every matrix every rank holds: pieces, of any DTensor placements or of replicated tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_group_rank, get_process_group_ranks
from torch.distributed.tensor import DTensor

from dmuon_tune.errors import UsageError

from ..blocks import Blocks
from .whole import weight_of, whole_of

Span = tuple[int, int]  # [start, stop)
Spans = tuple[Span, ...]  # in the order in which a local tensor holds them


@dataclass(frozen=True)
class Layout:
    """How a parameter lies on the ranks of a group.

    ``meshes`` are the ranks, row by row, of meshes of ``mesh_shape``; each holds the whole. More than one is what a
    parameter has that tensor parallelism leaves alone: one for each of its ranks. For each mesh dimension ``cuts`` says
    along which tensor dimension it cuts, and into how many strides first (1: plain ``Shard``); None: replicated.
    """

    shape: tuple[int, ...]
    meshes: tuple[tuple[int, ...], ...]
    mesh_shape: tuple[int, ...]
    cuts: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class Fragment:
    """A box of elements: where it lies in the holder's local tensor, and where in the matrix's own box; ``whole``: it
    is all of that tensor."""

    local: Spans
    place: Spans
    whole: bool = False

    def of(self, local: Tensor) -> Tensor:
        """The view of it of what its holder has."""
        return local if self.whole else cut(local, self.local)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.local)

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """What all of ``holders`` (ranks, ascending) hold of one matrix."""

    holders: tuple[int, ...]
    fragments: tuple[Fragment, ...]

    def sender(self, owner: int) -> int:
        """The holder that sends it: the owner itself where it is one, else the next in rank, mostly of its node."""
        return min(self.holders, key=lambda holder: (abs(holder - owner), holder))


@dataclass(frozen=True)
class Matrix:
    """One matrix: block ``block`` of parameter ``parameter``, whose ``box`` of elements it is.

    ``order``: the parameter's dimensions as flattened into it (empty: not flattened); its last two otherwise.
    """

    parameter: int
    block: int
    rows: int
    cols: int
    box: Spans
    order: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def lies_flat(self) -> bool:
        """Whether :meth:`flat` of a contiguous tensor is a view."""
        return list(self.order) == sorted(self.order)

    def boxed(self, matrix: Tensor) -> Tensor:
        """A contiguous (rows, cols) tensor as a view with the parameter's dimensions."""
        extents = [stop - start for start, stop in self.box]
        if not self.order:
            return matrix.view(extents)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return matrix.view([extents[dim] for dim in self.order]).permute(inverse)

    def flat(self, box: Tensor) -> Tensor:
        """The (rows, cols) matrix of a tensor with the parameter's dimensions; a view unless it lies otherwise."""
        return (box.permute(self.order) if self.order else box).reshape(self.rows, self.cols)


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, not a copy: a DTensor's local tensor, the owner's weight (elsewhere no row of
    it) of a parameter that has an owner, or the tensor itself."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor._local_tensor
        return local
    return weight_of(tensor)


def cut(tensor: Tensor, spans: Spans) -> Tensor:
    """The view of these spans, one a dimension."""
    if all(span == (0, size) for span, size in zip(spans, tensor.shape, strict=True)):
        return tensor
    return tensor[tuple([slice(start, stop) for start, stop in spans])]


def mesh_of(tensor: Tensor, group: ProcessGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(Ranks of ``group``, row by row; shape) of the mesh that a tensor lies on; a plain one is whole on each rank, or
    on its owner.

    UsageError where the mesh has ranks outside of the group.
    """
    whole = whole_of(tensor)
    if whole is not None:
        return (whole.owner,), (1,)
    if not isinstance(tensor, DTensor):
        return tuple(range(group.size())), (group.size(),)
    mesh = tensor.device_mesh.mesh
    ranks, members = mesh.flatten().tolist(), get_process_group_ranks(group)
    outside = sorted(set(ranks) - set(members))
    if outside:
        raise UsageError(
            f"its mesh has rank {outside[0]}, which is not in the optimizer's process group; pass process_group= with "
            "all ranks that hold the model"
        )
    return tuple(get_group_rank(group, rank) for rank in ranks), tuple(mesh.shape)


def cuts_of(tensor: Tensor) -> tuple[tuple[int, int] | None, ...]:
    """The ``cuts`` of a tensor's layout; UsageError for placements that are no shards or replicas."""
    if not isinstance(tensor, DTensor):
        return (None,)
    return tuple(_cut_of(placement, tensor.ndim) for placement in tensor.placements)


def _cut_of(placement: Any, ndim: int) -> tuple[int, int] | None:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or dim is None:
        raise UsageError(f"its placement is {placement}; parameters must be sharded or replicated")
    # _StridedShard, which FSDP2 over tensor parallelism makes, has a split factor.
    return dim % ndim, int(getattr(placement, "split_factor", 1))


@cache
def holdings(layout: Layout, later_first: bool = False) -> dict[int, tuple[Spans, ...]]:
    """Rank → the indices that it holds along each dimension of the tensor.

    Mesh dimensions cut one after another. ``later_first``: where a later one cuts the dimension that a strided one
    does, it cuts first and both plainly; that is how FSDP2 shards what tensor parallelism has sharded. Both are the
    same unless sizes do not divide.
    """
    found = {}
    for place, rank in ((place, rank) for mesh in layout.meshes for place, rank in enumerate(mesh)):
        held: list[Spans] = [((0, size),) if size else () for size in layout.shape]
        coordinate = _coordinate(place, layout.mesh_shape)
        steps = list(zip(layout.cuts, layout.mesh_shape, coordinate, strict=True))
        if later_first:
            steps = [step for step in steps if not _strided(step)] + [step for step in steps if _strided(step)]
        for along, parts, part in steps:
            if along is not None:
                dim, strides = along[0], 1 if later_first else along[1]
                held[dim] = _part(held[dim], strides, parts, part)
        found[rank] = tuple(held)
    return found


def _strided(step: tuple[tuple[int, int] | None, int, int]) -> bool:
    return step[0] is not None and step[0][1] > 1


def _coordinate(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    coordinate: list[int] = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        coordinate.insert(0, at)
    return tuple(coordinate)


def _part(spans: Spans, strides: int, parts: int, part: int) -> Spans:
    """Cut into ``strides`` chunks, each of them into ``parts``: the ``part``-th of each, as torch.chunk cuts."""
    length = sum(stop - start for start, stop in spans)
    taken: list[Span] = []
    for stride in range(strides):
        start, stop = _chunk(length, strides, stride)
        first, last = _chunk(stop - start, parts, part)
        taken += _within(spans, start + first, start + last)
    return _joined(taken)


def _chunk(length: int, parts: int, part: int) -> Span:
    size = -(-length // parts)
    return min(part * size, length), min((part + 1) * size, length)


def _within(spans: Spans, start: int, stop: int) -> list[Span]:
    """The indices at positions [start, stop) of spans that follow one another."""
    found, at = [], 0
    for first, last in spans:
        begin, end = max(start, at), min(stop, at + last - first)
        if begin < end:
            found.append((first + begin - at, first + end - at))
        at += last - first
    return found


def _joined(spans: Sequence[Span]) -> Spans:
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def matrices_of(parameter: int, layout: Layout, blocks: Blocks, name: str, later_first: bool) -> list[Matrix]:
    """The matrices of a parameter in the order of ``Blocks.of``; UsageError where one is no box of elements."""
    shape = layout.shape
    if blocks.order and blocks.sizes and blocks.dim == -1:
        raise UsageError(f"{name}: a flattened parameter that is distributed cannot be cut into columns; cut its rows")
    whole: Spans = tuple((0, size) for size in shape)
    boxes: list[Spans] = [whole]
    if blocks.sizes:
        dim = 0 if blocks.order else len(shape) + blocks.dim
        edges = [0, *accumulate(blocks.sizes)]
        boxes = [(*whole[:dim], span, *whole[dim + 1 :]) for span in pairwise(edges)]
    if len(shape) == 3 and not blocks.order:
        boxes = [((expert, expert + 1), *box[1:]) for box in boxes for expert in range(shape[0])]
    found = []
    for block, box in enumerate(boxes):
        extents = [stop - start for start, stop in box]
        rows, cols = (extents[0], prod(extents[1:])) if blocks.order else (extents[-2], extents[-1])
        pieces = pieces_of(layout, box, later_first)
        found.append(Matrix(parameter, block, rows, cols, box, blocks.order, pieces))
    return found


def local_shape(held: tuple[Spans, ...]) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in spans) for spans in held)


def shard_of(whole: Tensor, held: tuple[Spans, ...]) -> Tensor:
    """A rank's local tensor, a copy, of a tensor that is here as a whole."""
    for dim, spans in enumerate(held):
        parts = [whole.narrow(dim, start, stop - start) for start, stop in spans] or [whole.narrow(dim, 0, 0)]
        whole = torch.cat(parts, dim)
    return whole.contiguous()


@cache
def pieces_of(layout: Layout, box: Spans, later_first: bool = False) -> tuple[Piece, ...]:
    """The pieces of a box of a parameter; ranks that hold the same are holders of one piece."""
    holders: dict[tuple[Fragment, ...], list[int]] = {}
    fragments: dict[Hashable, tuple[Fragment, ...]] = {}
    for rank, held in sorted(holdings(layout, later_first).items()):
        if held not in fragments:
            runs = [_runs(spans, extent) for spans, extent in zip(held, box, strict=True)]
            everything = tuple((0, size) for size in local_shape(held))
            fragments[held] = tuple(
                Fragment(local, tuple(place for _, place in runs_of), local == everything)
                for runs_of in product(*runs) for local in [tuple(local for local, _ in runs_of)]
            )
        if fragments[held]:
            holders.setdefault(fragments[held], []).append(rank)
    return tuple(Piece(tuple(ranks), some) for some, ranks in holders.items())


def _runs(spans: Spans, extent: Span) -> list[tuple[Span, Span]]:
    """Where the indices of ``extent`` lie in a local tensor that holds ``spans``: (there, within extent)."""
    runs, at = [], 0
    for start, stop in spans:
        begin, end = max(start, extent[0]), min(stop, extent[1])
        if begin < end:
            runs.append(((at + begin - start, at + end - start), (begin - extent[0], end - extent[0])))
        at += stop - start
    return runs

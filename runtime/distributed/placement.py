"""What all ranks must know of a model: which matrices there are, where their pieces lie and who owns each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_tune.errors import UsageError

from ..blocks import Blocks
from ..ownership import Assignment, Costs, Work, assign
from ..ownership.costs import Point
from .control import Control
from .pieces import Layout, Matrix, Spans, cuts_of, holdings, local_of, local_shape, matrices_of, mesh_of

LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class Found(NamedTuple):
    """A parameter as messages name it, and how its matrices lie in it (None: it is AdamW's)."""

    name: str
    tensor: Tensor
    blocks: Blocks | None


@dataclass(frozen=True)
class Survey:
    """``matrices`` in model order, their ``parameter`` being the place among all. By parameter: ``replicated``, whether
    an element of it lies on more than one rank, and ``held``, the indices that this rank holds (None: it has no part
    in it)."""

    matrices: tuple[Matrix, ...] = ()
    replicated: tuple[bool, ...] = ()
    held: tuple[tuple[Spans, ...] | None, ...] = ()


def survey(found: Sequence[Found], group: ProcessGroup, control: Control, error: Exception | None) -> Survey:
    """Where every matrix lies; collective. ``error`` is why this rank has found nothing.

    Raises on all ranks where one has an error, other parameters, or shards that its placements do not describe.
    """
    described: list[Any] = []
    meshes: dict[tuple[int, ...], int] = {}  # tensor parallelism leaves parameters whose meshes differ by rank
    for name, tensor, _ in found if error is None else ():
        try:
            ranks, mesh_shape = mesh_of(tensor, group)
            mesh = meshes.setdefault(ranks, len(meshes))
            described.append((name, list(tensor.shape), str(tensor.dtype), mesh, mesh_shape, cuts_of(tensor)))
        except UsageError as raised:
            error = UsageError(f"{name}: {raised}")
            break
    control.agree("parameters", error=error)
    control.same([*described, *(repr(blocks) for _, _, blocks in found)], "parameters")
    by_rank = control.gather([list(ranks) for ranks in meshes], "meshes")
    alike = [tuple(sorted({tuple(ranks[mesh]) for ranks in by_rank})) for mesh in range(len(meshes))]
    layouts = [
        Layout(tuple(shape), alike[mesh], mesh_shape, cuts) for _, shape, _, mesh, mesh_shape, cuts in described
    ]
    later = _cut_later_first(found, layouts, control)
    matrices = [
        matrix for index, (layout, each) in enumerate(zip(layouts, found, strict=True)) if each.blocks is not None
        for matrix in matrices_of(index, layout, each.blocks, each.name, later[index])
    ]
    held = (holdings(layout, last).get(control.rank) for layout, last in zip(layouts, later, strict=True))
    return Survey(tuple(matrices), tuple(map(_replicated, layouts)), tuple(held))


def _cut_later_first(found: Sequence[Found], layouts: Sequence[Layout], control: Control) -> list[bool]:
    """Of each parameter, whether its shards are such as ``holdings`` calls so; UsageError where they are neither."""
    def differs(index: int, later_first: bool) -> bool:
        held = holdings(layouts[index], later_first).get(control.rank)
        return held is not None and local_shape(held) != tuple(local_of(found[index].tensor).shape)

    places = range(len(found))
    later = list(map(bool, control.agree("shards", [differs(index, False) for index in places])))
    wrong = [found[index].name for index in places if later[index] and differs(index, True)]
    error = UsageError(f"{wrong[0]}: its shard is not what its placements say; shard it evenly") if wrong else None
    control.agree("shards", error=error)
    return later


def _replicated(layout: Layout) -> bool:
    many = any(along is None and size > 1 for along, size in zip(layout.cuts, layout.mesh_shape, strict=True))
    return many or len(layout.meshes) > 1


def owners_of(
    matrices: Sequence[Matrix], found: Sequence[Found], momentum_dtype: torch.dtype | None, control: Control
) -> Assignment:
    """Who owns each matrix, decided by the first rank; collective."""
    def decided() -> list[Any]:
        work = []
        for matrix in matrices:
            name, tensor, _ = found[matrix.parameter]
            state_bytes = matrix.rows * matrix.cols * (momentum_dtype or tensor.dtype).itemsize
            work.append(Work(matrix.rows, matrix.cols, layer_of(name), _estimate(matrix), state_bytes))
        solved = assign(work, control.size)
        return [solved.owner, solved.loads_us, solved.bound_us, solved.method]

    owner, loads_us, bound_us, method = control.decide(decided, "owners")
    return Assignment(tuple(owner), tuple(loads_us), bound_us, method)


def layer_of(name: str) -> int:
    """The first number in a parameter's name: its block's place in the model."""
    number = LAYER.search(name)
    return int(number[1]) if number else 0


def _estimate(matrix: Matrix) -> Costs:
    m, n = sorted((matrix.rows, matrix.cols))
    return Costs((Point(1, float(6 * m * m * n + 14 * m**3), False),))

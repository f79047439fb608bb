"""What all ranks must know of a model: which matrices there are, where their pieces lie and who owns each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.matrices import layer_of
from dmuon_tune.recipe import Group

from ..blocks import Blocks
from ..newton_schulz import GramNewtonSchulz
from ..ownership import Assignment, Costs, Element, Timed, assign, batches, costs, costs_of, shares
from ..ownership.profile import profile as time_steps
from ..ownership_options import OwnershipOptions
from ..parameters import name_of
from .agreement import Agreement, Wanted
from .control import Control
from .options import check_alike
from .pieces import Layout, Matrix, Spans, cuts_of, holdings, local_of, local_shape, matrices_of, mesh_of
from .whole import whole_of
from .workload import Owned, work_of

if TYPE_CHECKING:
    from ..muon import Muon


class Found(NamedTuple):
    """A parameter as messages name it, and how its matrices lie in it (None: it is AdamW's)."""

    name: str
    tensor: Tensor
    blocks: Blocks | None

    @property
    def moves(self) -> bool:
        """Whether it is matrices that a step is to move."""
        return self.blocks is not None and self.tensor.requires_grad


@dataclass(frozen=True)
class Survey:
    """``matrices`` in model order, their ``parameter`` being the place among all. By parameter: ``indivisible``,
    whether an element of it lies on more than one rank, or all of it on one, and ``held``, the indices that this rank
    holds (None: it has no part in it)."""

    matrices: tuple[Matrix, ...] = ()
    indivisible: tuple[bool, ...] = ()
    held: tuple[tuple[Spans, ...] | None, ...] = ()


def found_of(optimizer: Muon) -> list[Found]:
    """An optimizer's parameters, in order."""
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            blocks = None
            if group["use_muon"]:
                blocks = optimizer._blocks_of(group, index, position) or Blocks()
            found.append(Found(name_of(group, index, position), p, blocks))
    return found


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
    check_alike({"parameters": [*map(_told, found, described)]}, control, "parameters")
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
    indivisible = (_replicated(layout) or whole_of(each.tensor) is not None
                   for layout, each in zip(layouts, found, strict=True))
    return Survey(tuple(matrices), tuple(indivisible), tuple(held))


def _told(each: Found, described: Sequence[Any]) -> dict[str, Any]:
    """What all ranks must have alike of a parameter."""
    name, shape, dtype, mesh, mesh_shape, cuts = described
    return {
        "name": name, "shape": shape, "dtype": dtype, "mesh": mesh, "the mesh's shape": mesh_shape, "placements": cuts,
        "matrices": repr(each.blocks), "requires_grad": each.tensor.requires_grad,
    }


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
    matrices: Sequence[Matrix], owned: Sequence[tuple[Matrix, int]], found: Sequence[Found],
    momentum_dtype: torch.dtype | None, control: Control, chains: GramNewtonSchulz, device: torch.device,
    bucket_bytes: int, profile: bool, options: OwnershipOptions,
) -> Assignment:
    """Who owns each of ``matrices``, beside those that are ``owned`` by ranks already; decided by the first rank by its
    caches' costs or, to ``profile``, by what all ranks time now; collective. An owner's batches are at most
    ``bucket_bytes`` of the parameter's dtype."""
    counts = Counter((matrix.rows, matrix.cols) for matrix in matrices)
    groups = [Group(count, *shape) for shape, count in counts.items()]
    dtypes = [found[matrix.parameter].tensor.dtype for matrix in matrices]
    measured = _timed(groups, chains, device, dtypes[0], bucket_bytes, control) if profile else None
    arithmetic = chains.steps, chains.restarts
    beside = _beside(owned, found, momentum_dtype, options)

    def price(every: Iterable[Group], element: Element) -> dict[tuple[int, int], Costs]:
        if measured is not None:
            return costs(every, measured, device.type, *arithmetic)
        return costs_of(every, fingerprint(str(device)), chains.dtype, chains._layers, *arithmetic, element)

    def decided() -> list[Any]:
        wanted = [
            Owned(matrix.rows, matrix.cols, layer_of(found[matrix.parameter].name),
                  Element(dtype.itemsize, (momentum_dtype or dtype).itemsize, dtype.itemsize))
            for matrix, dtype in zip(matrices, dtypes, strict=True)
        ]
        work = work_of(wanted, price, bucket_bytes)
        solved = assign(work, control.size, nodes=nodes_of(control.ranks), **vars(beside))
        return [solved.owner, solved.loads_us, solved.bound_us, solved.method]

    owner, loads_us, bound_us, method = control.decide(decided, "owners")
    return Assignment(tuple(owner), tuple(loads_us), bound_us, method)


def _beside(
    owned: Sequence[tuple[Matrix, int]], found: Sequence[Found], momentum_dtype: torch.dtype | None,
    options: OwnershipOptions,
) -> OwnershipOptions:
    """The options where owners have momenta already: for the solver all are equal, so that all have as much left as the
    fullest one; UsageError where that is nothing."""
    held = Counter[int]()
    for matrix, owner in owned:
        dtype = momentum_dtype or found[matrix.parameter].tensor.dtype
        held[owner] += matrix.rows * matrix.cols * dtype.itemsize if found[matrix.parameter].moves else 0
    if options.memory_bytes is None or not held:
        return options
    left = options.memory_bytes - max(held.values())
    if left <= 0:
        raise UsageError(f"ownership.memory_bytes is {options.memory_bytes}, and an owner has as much; raise it")
    return replace(options, memory_bytes=left)


def _timed(
    groups: Sequence[Group], chains: GramNewtonSchulz, device: torch.device, dtype: torch.dtype, bucket_bytes: int,
    control: Control,
) -> list[Timed]:
    """The model's own batches, each timed by one rank; collective. By chains of their own, whose buffers go again."""
    wanted = batches(groups, control.size, bucket_bytes // dtype.itemsize)
    mine = shares(wanted, control.size)[control.rank]
    own = GramNewtonSchulz(
        chains.coefficients, chains.steps, chains.restarts, chains.dtype, layers=chains._layers, eps=chains.eps,
        on_miss="heuristic", graphs=False,
    )
    Agreement(own, device, control).prepare(Wanted.of(group, dtype, "n", dtype) for group in mine)
    times, error = list[Timed](), None
    try:
        times = time_steps(mine, device, own, dtype)
    except Exception as raised:  # a kernel's launch may raise anything, and the other ranks wait
        error = raised
    every = control.gather([[t.group.batch, t.group.rows, t.group.cols, t.us] for t in times], "profile", error)
    return [Timed(Group(int(batch), int(rows), int(cols)), us) for each in every for batch, rows, cols, us in each]


def nodes_of(ranks: Sequence[int]) -> int:
    """How many nodes the ranks lie on, equally many each, as ``torchrun`` says; 1 where that is not so."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or len(ranks))
    on_node = Counter(rank // local for rank in ranks)
    return len(on_node) if len(set(on_node.values())) == 1 and list(ranks) == sorted(ranks) else 1

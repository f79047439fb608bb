"""What owners run of a model: the options that ``plan`` and ``tune`` share, and what follows from them and caches."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dmuon_tune.matrices import layer_of
from dmuon_tune.problem import DTYPES, ITEM_BYTES, Problem
from dmuon_tune.recipe import WEIGHTS_DTYPE, Group, Recipe, default_dtype

from . import options, workload

if TYPE_CHECKING:
    from dmuon_tune.cache import CacheEntry, Store
    from dmuon_tune.device import DeviceFingerprint
    from dmuon_tune.runtime.distributed.workload import Owned
    from dmuon_tune.runtime.ownership import Work


MAX_WORLD_SIZE = 2**17  # owners; more than any machine has GPUs


def add_options(group: Any, needed: bool) -> None:
    """``--world-size``, which may be ``needed``, and how matrices travel between ranks."""
    group.add_argument(
        "--world-size", type=_world_size, required=needed, metavar="N",
        help="ranks, all owners" if needed else "tune the batches that owners of so many ranks run, as 'plan' divides "
        "the model by what the caches know now (default: those of one process)",
    )
    group.add_argument(
        "--bucket-bytes", type=options.positive, metavar="N",
        help="of an owner's batch in one round, as Muon's (default: 268435456)",
    )
    group.add_argument(
        "--param-dtype", type=options.dtype, metavar="DTYPE",
        help=f"of gradients and weights, such as float32 under FSDP2's mixed precision: {', '.join(DTYPES)} (default: "
        f"{WEIGHTS_DTYPE})",
    )
    group.add_argument(
        "--momentum-dtype", type=options.dtype, metavar="DTYPE", help="default: the parameters'",
    )


def _world_size(text: str) -> int:
    size = options.positive(text)
    if size > MAX_WORLD_SIZE:
        raise argparse.ArgumentTypeError(f"{size} ranks are more than {MAX_WORLD_SIZE}")
    return size


@dataclass(frozen=True)
class Division:
    """A model's matrices as ``world_size`` owners may have them, in its order, what each costs, and of how many timed
    batches these costs come; ``recipes`` are the caches', for chains of the dtype asked for."""

    matrices: list[Owned]
    work: list[Work]
    timed: int
    recipes: list[Recipe]
    world_size: int
    bucket_bytes: int

    def batches(self, owner: Sequence[int]) -> list[Group]:
        """What owners run, each batch once."""
        from dmuon_tune.runtime.distributed.workload import batches_of

        return batches_of(self.matrices, owner, self.world_size, self.bucket_bytes)

    def untuned(self, batches: Iterable[Group]) -> list[Group]:
        """Those that the caches have no recipe for."""
        tuned = {recipe.group for recipe in self.recipes}
        return [batch for batch in batches if batch not in tuned]


def divide(
    args: argparse.Namespace, found: workload.Workload, device: DeviceFingerprint, stores: Sequence[Store]
) -> Division:
    """What is to be divided, by the costs that ``stores`` know of the device."""
    from dmuon_tune.runtime.distributed.rounds import BUCKET_BYTES
    from dmuon_tune.runtime.distributed.workload import Owned, work_of
    from dmuon_tune.runtime.ownership import Element, costs
    from dmuon_tune.runtime.ownership.pricing import known_of

    def entries(problem: Problem) -> list[CacheEntry]:
        return [entry for store in stores for entry in store.entries(problem, device)]

    size = ITEM_BYTES[args.param_dtype or WEIGHTS_DTYPE]
    element = Element(size, ITEM_BYTES[args.momentum_dtype] if args.momentum_dtype else size, size)
    dtype = args.dtype or default_dtype(device.kind)
    recipes = [recipe for store in stores for recipe in store.recipes(device) if recipe.dtype == dtype]
    known = known_of(recipes, entries, device.kind, dtype, element=element)
    matrices = [
        Owned(each.rows, each.cols, place if args.shapes else layer_of(each.name), element)
        for each in found.selection.matrices for place in range(each.count)
    ]
    bucket_bytes = args.bucket_bytes or BUCKET_BYTES
    work = work_of(matrices, lambda groups, _: costs(groups, known, device.kind), bucket_bytes)
    return Division(matrices, work, len(known), recipes, args.world_size, bucket_bytes)

"""What an owner's report says of its batch: each matrix's momentum, as the last step has left it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..report import Direction, block_name, factor_of
from .pieces import Matrix, local_of

if TYPE_CHECKING:
    from ..muon import Muon


def directions(optimizer: Muon, matrices: Sequence[Matrix], batch: Iterable[int]) -> list[Direction]:
    """Of those of all ``matrices`` that this rank owns, by place."""
    found = []
    places = [(index, position) for index, group in enumerate(optimizer.param_groups)
              for position in range(len(group["params"]))]
    blocks = Counter(matrix.parameter for matrix in matrices)
    for matrix in (matrices[place] for place in batch):
        index, position = places[matrix.parameter]
        group = optimizer.param_groups[index]
        p = group["params"][position]
        name = block_name(group, index, position, matrix.block, blocks[matrix.parameter])
        momentum = optimizer.state.get(p, {}).get("owned", {}).get(matrix.block)
        shape = matrix.rows, matrix.cols
        local = local_of(p)
        found.append(Direction(name, shape, momentum, factor_of(group, shape), local.device, local.dtype))
    return found

"""The ranks of owners as nodes and places within them, between which transfers are staged."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .rule import UnsuitableError


@dataclass(frozen=True)
class Grid:
    """``rows`` are nodes: ranks of the group, by place. ``inside`` is the process group of this rank's row; ``across``
    that of its column, None where there is one row. This rank is in row ``node``, at ``place``."""

    rows: tuple[tuple[int, ...], ...]
    node: int
    place: int
    inside: dist.ProcessGroup
    across: dist.ProcessGroup | None

    @classmethod
    def of(cls, mesh: DeviceMesh, group: dist.ProcessGroup) -> Grid:
        """Rows of a mesh (nodes, local), whose ranks are ``group``'s; of any other mesh one row of all ranks.

        UnsuitableError for a mesh of more dimensions.
        """
        if mesh.ndim > 2:
            raise UnsuitableError(f"the mesh has {mesh.ndim} dimensions; give one of ranks, or of (nodes, local)")
        own = dist.get_rank(group)
        rows = mesh.mesh.view(-1, mesh.shape[-1]).tolist()
        ranks = [[dist.get_group_rank(group, rank) for rank in row] for row in rows]
        ascending = all(some == sorted(some) for some in (*ranks, *map(list, zip(*ranks, strict=True))))
        if len(ranks) == 1 or len(ranks[0]) == 1 or not ascending:
            return cls((tuple(range(group.size())),), 0, own, group, None)
        node = next(node for node, row in enumerate(ranks) if own in row)
        return cls(tuple(map(tuple, ranks)), node, ranks[node].index(own), mesh.get_group(1), mesh.get_group(0))

    @property
    def order(self) -> list[int]:
        """All ranks, column by column, so that a place's part of a buffer is one piece."""
        return [rank for column in zip(*self.rows, strict=True) for rank in column]

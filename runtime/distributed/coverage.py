"""Whether all ranks of a group have the same parameters, and together every element of them equally often."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_tune.errors import UsageError
from dmuon_tune.words import counted

from .whole import whole_of

KNOWN = 8  # lists of parameters that are remembered of a group
MARKS = 2**18  # whose squares, summed over 100 000 ranks, float64 has exactly


@dataclass
class Coverage:
    """What one of ``size`` ranks tells the others of its ``parameters``.

    ``told`` are three numbers for a sum over the ranks, which is ``due`` where all have the same: how many elements it
    holds, each times the number of shards of its parameter; a mark of all names and shapes, in any order; its square.
    Ranks with other marks all find another sum, for marks of this mean and mean square are equal.
    """

    parameters: Sequence[weakref.ref[Tensor]]
    size: int
    told: Tensor
    due: Tensor
    agreed: bool = False

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        return len(parameters) == len(self.parameters) and all(
            ref() is p for ref, p in zip(self.parameters, parameters, strict=True)
        )

    def checked(self, total: Tensor, summed: Tensor) -> Tensor:
        """The total, where the sum says that ranks have the same; otherwise UsageError, and NaN once they have agreed,
        for to read the sum waits for the device."""
        is_due = (summed == self.due).all()
        if not self.agreed and not is_due:
            raise UsageError(
                f"clip_grad_norm_: not each of {counted(self.size, 'rank')} has given its part of the same parameters; "
                "give all of them, those without a gradient too, and the process_group of ranks that have them"
            )
        self.agreed = True
        return total.masked_fill(~is_due, math.nan)


_known: WeakKeyDictionary[ProcessGroup, list[Coverage]] = WeakKeyDictionary()


def coverage_of(
    named: Sequence[tuple[str, Tensor]], group: ProcessGroup, kind: str, held: Callable[[Tensor], tuple[int, Tensor]]
) -> Coverage:
    """Of these parameters, to be told on devices of a ``kind``; made once. ``held``: into how many shards one is cut,
    and this rank's."""
    known, parameters = _known.setdefault(group, []), [p for _, p in named]
    for each in known:
        if each.is_of(parameters):
            return each
    shared = [p for p in parameters if whole_of(p) is None]  # of the others the owner has all
    here = sum(shards * local.numel() for shards, local in map(held, shared))
    mark = crc32(repr(sorted((name, tuple(p.shape)) for name, p in named)).encode()) % MARKS
    told, one = (
        torch.tensor([elements, mark, mark**2], dtype=torch.float64, device=kind)
        for elements in (here, sum(p.numel() for p in shared))
    )
    made = Coverage(list(map(weakref.ref, parameters)), group.size(), told, one * group.size())
    known.insert(0, made)
    del known[KNOWN:]
    return made

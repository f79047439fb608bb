"""What a rank has found of its weights and momenta, for as long as they are the same and lie as they did."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..steady import same, values_of
from .exchange import Transfer
from .pieces import Matrix, local_of
from .whole import whole_of

_LOCAL = attrgetter("_local_tensor")


@dataclass
class Lot:
    """Fragments of weights that move at one rate, ``matrix``'s, and their places among the parcels of a transfer."""

    matrix: Matrix
    weights: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


class Weights:
    """What this rank holds of ``parameters``, in their order: ``local`` tensors, the lots that transfers move: of
    what is kept, and of what arrives, and the ``whole`` matrices that a transfer leaves here; whether any of them
    ``has_owners`` between steps too."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.local = list(map(local_of, parameters))
        self.lots: WeakKeyDictionary[Transfer, tuple[list[Lot], list[Lot]]] = WeakKeyDictionary()
        self.whole: WeakKeyDictionary[Transfer, list[Tensor]] = WeakKeyDictionary()
        self.has_owners = any(whole_of(p) is not None for p in parameters)
        self._sharded = [p for p in parameters if isinstance(p, DTensor)]
        self._shards = list(map(_LOCAL, self._sharded))
        self._columns = self._read()

    def are_so(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the same parameters, and lie as they did."""
        return (
            same(parameters, self.parameters) and same(list(map(_LOCAL, self._sharded)), self._shards)
            and self._read() == self._columns
        )

    def _read(self) -> list[list[Any]]:
        """Columns, each read by one pass in C; of another shape or dtype they are not what has been placed."""
        return [list(map(Tensor.data_ptr, self.local)), list(map(Tensor.stride, self.local))]


class Owned:
    """The momenta that this rank owns of what moves in steps of a ``kind``: ``momenta``, by parameter and block."""

    def __init__(
        self, kind: Hashable, state: Mapping[Tensor, dict[str, Any]], parameters: Sequence[Tensor],
        momenta: dict[int, dict[int, Tensor]],
    ) -> None:
        self.momenta = momenta
        self._kind, self._keys, self._states = kind, list(state), list(state.values())
        self._own = [state[parameters[parameter]] for parameter in momenta]
        self._values, self._buffers = self._read()

    def are_so(self, kind: Hashable, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether steps are of this kind, and the momenta are where they were."""
        return (
            kind == self._kind and same(state, self._keys) and same(state.values(), self._states)
            and all(map(same, self._read(), (self._values, self._buffers)))
        )

    def _read(self) -> tuple[Collection[Any], Collection[Any]]:
        return values_of(self._own), values_of(self.momenta.values())

"""Where equal matrices lie, for launches that read them by address: on the host, and in tensors on their device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
from torch import Tensor

from .static import Static

ALIGNMENT_BYTES = 16  # of what products read and write

Matrices = Tensor | tuple[Tensor, ...]  # equal contiguous matrices: a batch, or a tensor each


class Placed:
    """What the launches of one batch read besides its matrices: where those lie, and their rates; piece by piece.

    ``replay`` is the graph of a whole step that reads these, and ``launches`` those that are in it.
    """

    def __init__(self, device: torch.device, pieces: int, in_capture: bool = False) -> None:
        self.gradients, self.momenta = (Static(device, torch.int64, 0, in_capture) for _ in range(2))
        self._weights = [Static(device, torch.int64, 0, in_capture) for _ in range(pieces)]
        self._rates = [Static(device, torch.float32, 2, in_capture) for _ in range(pieces)]
        self.launches: tuple[Any, ...] = ()
        self.replay: Any = None

    def weights(
        self, piece: int, where: Sequence[int], rates: Sequence[tuple[float, float]]
    ) -> tuple[Tensor, Tensor]:
        """The addresses of a piece's weights and their (decay, rate), as the update in the last product reads them."""
        return self._weights[piece].holding(where), self._rates[piece].holding(tuple(chain.from_iterable(rates)))


def addresses(matrices: Matrices | Sequence[Tensor]) -> Sequence[int]:
    """Where each matrix begins."""
    if isinstance(matrices, Tensor):
        return spaced(matrices, matrices.shape[0])
    return tuple(map(Tensor.data_ptr, matrices))


def spaced(matrices: Tensor, count: int) -> range:
    """Where each of ``count`` matrices in one contiguous tensor begins."""
    start, size = matrices.data_ptr(), matrices.nbytes
    return range(start, start + size, size // count)


def aligned(where: Sequence[int]) -> bool:
    """Whether products can write at all of these addresses."""
    return reduce(or_, where) % ALIGNMENT_BYTES == 0


def contiguous(tensors: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, tensors))


def writable(tensor: Tensor) -> bool:
    """Whether a product can write this tensor itself."""
    return aligned([tensor.data_ptr()]) and tensor.is_contiguous()

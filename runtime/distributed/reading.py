"""What a step reads: options, and the weights, gradients and momenta that lie here, which mostly do so as before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dmuon_tune.errors import UsageError

from ..batches import Setting
from .gradients import Gradients, are_usual
from .held import Owned, Weights
from .pieces import Matrix, local_of
from .pipeline import Moving

if TYPE_CHECKING:
    from ..muon import Muon

_GRADIENT = attrgetter("grad")


class Reading:
    """Of an optimizer's steps while its parameters are placed so: of its ``matrices`` this rank owns those at
    ``places``, with momenta of ``momentum_dtype`` (None: the parameter's)."""

    def __init__(
        self, matrices: Sequence[Matrix], places: Sequence[int], momentum_dtype: torch.dtype | None
    ) -> None:
        self._matrices, self._places, self._momentum_dtype = matrices, set(places), momentum_dtype
        self._weights: Weights | None = None
        self._gradients: Gradients | None = None
        self._owned: Owned | None = None
        self._amsgrads: list[bool] = []  # which ask for more state

    def next(self, optimizer: Muon, parameters: Sequence[Tensor], by_adamw: bool) -> tuple[bytes, Moving]:
        """The codes of the gradients that ``parameters``, all in order, have here, and what the step reads;
        ``by_adamw``: AdamW's state is what its last step has left.

        UsageError, by name, for what cannot be used. All of it is checked once, then what may have changed, on local
        tensors alone: a DTensor takes its time to answer.
        """
        optimizer._check_groups()
        gradients: list[Tensor | None] = list(map(_GRADIENT, parameters))
        local = [None if each is None else local_of(each) for each in gradients]
        weights, known = self._weights, self._gradients
        lies = weights is not None and weights.are_so(parameters)
        if weights is None or not lies:
            weights, known = Weights(parameters), None
        if known is not None and not known.are_alike(gradients, local):
            known = None
        usual = known.are_usual if known else are_usual(weights.local, local)
        amsgrads = [group["amsgrad"] for group in optimizer.param_groups if not group["use_muon"]]
        if not (lies and usual and by_adamw and amsgrads == self._amsgrads):
            optimizer._check_step()
        self._amsgrads = amsgrads
        self._weights, self._gradients = weights, known or Gradients(parameters, gradients, local, usual)
        return self._gradients.codes, self.of(optimizer, weights, local)

    def of(self, optimizer: Muon, weights: Weights, gradients: list[Tensor | None]) -> Moving:
        """What a step reads of the groups, and of these, which lie here."""
        settings: list[Setting | None] = []
        for index, group in enumerate(optimizer.param_groups):
            setting = Setting(group, index) if group["use_muon"] else None
            settings += [setting] * len(group["params"])
        return Moving(settings, weights, gradients)

    def carry(self, optimizer: Muon, moving: Moving, codes: bytes) -> None:
        """Bring the momenta of what moves to this step, unless the one before has left them so."""
        if not self.is_steady(optimizer, moving, codes):
            carried = self._carried(optimizer.state, moving, codes)
            self._owned = Owned(_kind(moving, codes), optimizer.state, moving.weights.parameters, carried)
        assert self._owned is not None
        moving.owned.update(self._owned.momenta)

    def is_steady(self, optimizer: Muon, moving: Moving, codes: bytes) -> bool:
        """Whether the same matrices move as in the step before, and their momenta are as that has left them."""
        return self._owned is not None and self._owned.are_so(_kind(moving, codes), optimizer.state)

    def foreseen(self, optimizer: Muon, codes: bytes) -> Moving | None:
        """What the next step will read but gradients, if it is like the one before, whose ``codes`` these are; None
        where it cannot be."""
        with suppress(UsageError):  # which the step raises on all ranks
            optimizer._check_groups()
            if self._weights is not None and self._weights.are_so(list(optimizer._parameters())):
                moving = self.of(optimizer, self._weights, [None] * len(codes))
                if self.is_steady(optimizer, moving, codes):
                    self.carry(optimizer, moving, codes)
                    return moving
        return None

    def _carried(
        self, state: dict[Tensor, dict[str, Any]], moving: Moving, codes: bytes
    ) -> dict[int, dict[int, Tensor]]:
        """The momenta of matrices that move, made where they move for the first time, all at this step's μ."""
        found: dict[int, dict[int, Tensor]] = {}
        for place, matrix in enumerate(self._matrices):
            if codes[matrix.parameter]:
                p = moving.weights.parameters[matrix.parameter]
                owned = found[matrix.parameter] = state[p].setdefault("owned", {})
                if place in self._places and matrix.block not in owned:
                    local = local_of(p)
                    owned[matrix.block] = torch.zeros(
                        matrix.rows, matrix.cols, dtype=self._momentum_dtype or local.dtype, device=local.device
                    )
        for parameter, owned in found.items():
            setting = moving.settings[parameter]
            assert setting is not None
            setting.carry(state[moving.weights.parameters[parameter]], owned.values())
        return found


def _kind(moving: Moving, codes: bytes) -> Hashable:
    """Of steps that need momenta alike."""
    return codes, *((each.mu, each.average) if each else None for each in dict.fromkeys(moving.settings))

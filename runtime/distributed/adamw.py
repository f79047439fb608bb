"""PyTorch's fused AdamW on what this rank holds of each parameter: elementwise, so it needs no other rank."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..eager import EagerAdamW, laid_like
from ..steady import same, values_of
from .pieces import local_of


class Part(NamedTuple):
    """The parameters of a group that have a gradient, and what this rank holds of both."""

    group: Mapping[str, Any]
    parameters: Sequence[Tensor]
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]


class LocalAdamW:
    """Steps DTensors and plain tensors; the state stays the parameters', as DTensors like them."""

    def __init__(self) -> None:
        self._adamw: _AdamW | None = None
        self._found: tuple[Any, ...] = ()
        self._stepped: list[Tensor] = []
        self._own: list[dict[str, Any]] = []
        self._values: list[Any] = []

    def has_left(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether ``state`` is what the last step has left."""
        own = [state.get(p) for p in self._stepped]
        return bool(own) and same(own, self._own) and same(values_of(self._own), self._values)

    def step(
        self, parts: Sequence[Part], state: MutableMapping[Tensor, dict[str, Any]], found: tuple[Any, ...]
    ) -> None:
        """One update by the groups' options; ``state`` is kept. ``found``: objects that are other ones where weights
        lie otherwise than in the step before, or others have a gradient."""
        parts = [part._replace(gradients=list(map(laid_like, part.weights, part.gradients)))
                 for part in parts if part.parameters]
        if not parts:
            return
        groups = [{**part.group, "params": part.weights} for part in parts]
        if self._adamw is None:
            self._adamw = _AdamW(groups)
        found = *found, *((len(part.parameters), part.group["amsgrad"]) for part in parts)
        own = [state.get(p) for part in parts for p in part.parameters]
        steady = same(own, self._own) and found == self._found and same(values_of(self._own), self._values)
        if not steady:
            self._take(parts, state)
        self._adamw.param_groups, self._adamw.gradients = groups, [part.gradients for part in parts]
        self._adamw.step()
        self._adamw.gradients = []  # which are not to live longer than the caller's
        if not steady:
            self._give(parts, state)
            self._found, self._stepped = found, [p for part in parts for p in part.parameters]
            self._own = [state[p] for p in self._stepped]
            self._values = values_of(self._own)

    def _take(self, parts: Sequence[Part], state: Mapping[Tensor, dict[str, Any]]) -> None:
        """The parameters' state, as PyTorch's optimizer has it of what lies here."""
        assert self._adamw is not None
        self._adamw.lists.clear()
        for part in parts:
            for p, weight, gradient in zip(part.parameters, part.weights, part.gradients, strict=True):
                if weight is not p:
                    weight.grad = gradient
                if p in state:
                    self._adamw.state[weight] = {key: _local(value) for key, value in state[p].items()}

    def _give(self, parts: Sequence[Part], state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        """What the first step of a parameter has made."""
        assert self._adamw is not None
        for part in parts:
            for p, weight in zip(part.parameters, part.weights, strict=True):
                kept = state.setdefault(p, {})
                for key, value in self._adamw.state[weight].items():
                    if key not in kept:
                        kept[key] = like(p, value) if value.shape == weight.shape and key != "step" else value
                if weight is not p:
                    weight.grad = None
        self._adamw.state.clear()


class _AdamW(EagerAdamW):
    """Has the ``lists`` of each group's state, which a step reads, from the last one that had to collect them."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__(groups)
        self.gradients: Sequence[Sequence[Tensor]] = ()  # of the groups
        self.lists: dict[int, tuple[list[Tensor], ...]] = {}  # by the group's place

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        place = next(place for place, each in enumerate(self.param_groups) if each is group)
        if place not in self.lists:
            super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
            self.lists[place] = tuple(map(list, lists[2:]))
        else:
            for its, known in zip(lists, (group["params"], self.gradients[place], *self.lists[place]), strict=True):
                its += known
        return False  # none is complex


def like(p: Tensor, local: Tensor) -> Tensor:
    """A tensor of a parameter's shape and placements, of which this rank holds ``local``."""
    if not isinstance(p, DTensor):
        return local
    found: Tensor = DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return found


def _local(value: Any) -> Any:
    return local_of(value) if isinstance(value, Tensor) else value

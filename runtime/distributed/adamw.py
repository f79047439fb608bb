"""PyTorch's fused AdamW on what this rank holds of each parameter: elementwise, so it needs no other rank."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..eager import EagerAdamW
from .pieces import local_of


class LocalAdamW:
    """Steps groups of DTensors and plain tensors; the state stays the parameters', as DTensors like them."""

    def __init__(self) -> None:
        self._adamw: EagerAdamW | None = None

    def step(self, groups: Sequence[dict[str, Any]], state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        """One update of the parameters that have a gradient, by their groups' options; ``state`` is kept."""
        parts = [{**group, "params": [_with_gradient(p) for p in group["params"] if p.grad is not None]}
                 for group in groups]
        parts = [part for part in parts if part["params"]]
        if not parts:
            return
        if self._adamw is None:
            self._adamw = EagerAdamW(parts)
        local = {p: local_of(p) for group in groups for p in group["params"] if p.grad is not None}
        self._adamw.param_groups = parts
        self._adamw.state.clear()
        for p, part in local.items():
            if p in state:
                self._adamw.state[part] = {key: _local(value) for key, value in state[p].items()}
        self._adamw.step()
        for p, part in local.items():
            kept = state.setdefault(p, {})
            for key, value in self._adamw.state[part].items():
                if key not in kept:
                    kept[key] = like(p, value) if value.shape == part.shape and key != "step" else value
            if part is not p:
                part.grad = None
        self._adamw.state.clear()


def like(p: Tensor, local: Tensor) -> Tensor:
    """A tensor of a parameter's shape and placements, of which this rank holds ``local``."""
    if not isinstance(p, DTensor):
        return local
    found: Tensor = DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return found


def _with_gradient(p: Tensor) -> Tensor:
    local = local_of(p)
    if local is not p:
        assert p.grad is not None
        local.grad = local_of(p.grad)
    return local


def _local(value: Any) -> Any:
    return local_of(value) if isinstance(value, Tensor) else value

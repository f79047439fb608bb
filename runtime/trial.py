"""Whether PyTorch's AdamW takes a group's options: tried on a few elements, before a step has moved anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.errors import UsageError, said

from .eager import EagerAdamW
from .parameters import needed_options


def form_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of AdamW's options decides whether they can be used together: of numbers their kind, not their value."""
    return tuple(_form(group[option]) for option in needed_options(use_muon=False))


def try_adamw(group: Mapping[str, Any], state: Mapping[Tensor, Any], where: str) -> None:
    """UsageError where AdamW cannot step with the group's options, on one element of each kind of its parameters."""
    kinds = {(p.device, p.dtype, _count_device(state.get(p))) for p in group["params"] if p.requires_grad}
    tried: list[Tensor] = [torch.zeros(1, device=device, dtype=dtype) for device, dtype, _ in kinds]
    if not tried:
        return
    options = {option: group[option] for option in needed_options(use_muon=False)}
    adamw = EagerAdamW([{**options, "params": tried}])
    for p, (*_, count_device) in zip(tried, kinds, strict=True):
        p.grad = torch.zeros_like(p)
        if count_device is not None:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
            adamw.state[p] = {"step": torch.zeros((), device=count_device), **moments}
    try:
        adamw._stepped()  # without the hooks of all optimizers
    except Exception as error:  # whatever PyTorch raises for what it does not support
        raise UsageError(f"{where}AdamW cannot step with these options ({said(error)}); change them") from None


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.device, value.dtype, value.shape
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return value if value is None or isinstance(value, bool) else type(value)


def _count_device(state: Any) -> torch.device | None:
    """Where AdamW counts a parameter's steps; None before the first one."""
    count = state.get("step") if isinstance(state, Mapping) else None
    return count.device if isinstance(count, Tensor) else None

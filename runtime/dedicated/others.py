"""Refuses optimizers that have dedicated parameters and do not know it: PyTorch's, and a Muon made too early."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dmuon_tune.errors import UsageError

from ..distributed.whole import whole_of


@cache
def watch() -> None:
    """From now on, in this process; a parameter's memory is mostly not there for them to write to."""
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, arguments: Any, named: Any) -> None:
    if getattr(optimizer, "_gather", None) is not None:  # a Muon that knows its owners
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            whole = whole_of(p)
            if whole is not None:
                raise UsageError(
                    f"{whole.name} is dedicated, and this {type(optimizer).__name__} cannot move it; make Muon(model) "
                    "after dedicate and fully_shard"
                )

"""A group of torch.optim.Muon's checkpoint as one of this optimizer's."""

from __future__ import annotations

from typing import Any

from dmuon_tune import checks
from dmuon_tune.errors import UsageError
from dmuon_tune.words import shown

SCALES_OF = {None: "jordan", "original": "jordan", "match_rms_adamw": "moonlight"}


def adopt(group: dict[str, Any]) -> float:
    """Turn a loaded group into one of this optimizer's, in place; returns what its momentum is to be multiplied by.

    1 for a group of this optimizer. PyTorch's momentum is M ← μM + (1 − μ)G, kept here as M / (1 − μ). Its
    coefficients, steps and eps are dropped: the chain is the constructor's.
    Raises UsageError for a scale or μ that is unknown here.
    """
    if "adjust_lr_fn" not in group:
        return 1.0
    rule = group.pop("adjust_lr_fn")
    if rule not in SCALES_OF:
        raise UsageError(f"adjust_lr_fn {shown(rule)} is unknown here; original and match_rms_adamw can be loaded")
    for name in ("ns_coefficients", "ns_steps", "eps"):
        group.pop(name, None)
    group.update(scale=SCALES_OF[rule], momentum_form="ema")
    checks.number("momentum", group["momentum"], below=1.0)
    return 1 / (1 - float(group["momentum"]))

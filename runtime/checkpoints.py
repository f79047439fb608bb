"""What a checkpoint becomes here: its options, its momentum, and what is refused of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dmuon_tune import checks
from dmuon_tune.errors import UsageError
from dmuon_tune.words import shown

from .distributed.whole import weight_of
from .parameters import check_options, foreign, name_of

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


def restore(
    state: Mapping[Tensor, dict[str, Any]], groups: list[dict[str, Any]], saved: Mapping[str, Any],
    before: list[dict[str, Any]], momentum_dtype: torch.dtype | None,
) -> None:
    """Turn what PyTorch has loaded from ``saved`` into this optimizer's own, in place; ``before``: its groups as they
    were. Raises UsageError, by name, for what is no state of this model."""
    for index, (group, old) in enumerate(zip(groups, before, strict=True)):
        if group.setdefault("use_muon", old["use_muon"]) != old["use_muon"]:
            names = {True: "Muon", False: "AdamW"}
            raise UsageError(
                f"group {index} is {names[old['use_muon']]}'s here and was {names[group['use_muon']]}'s when it "
                "was saved; make the optimizer with the groups it had"
            )
        factor = adopt(group) if old["use_muon"] else 1.0
        group.update({name: old[name] for name in ("split", "split_dim", "flatten") if name in old})
        for name, value in old.items():
            group.setdefault(name, value)  # an option younger than what was saved
        check_options(group, f"group {index}: ", wait=False)
        keys = saved["param_groups"][index]["params"]
        for position, (p, key) in enumerate(zip(group["params"], keys, strict=True)):
            its = saved["state"].get(key, {})
            reason = foreign(its, group)  # of what was saved: PyTorch has made it real
            if reason is not None:
                raise UsageError(f"{name_of(group, index, position)}: {reason}")
            momentum = its.get("momentum_buffer")
            dtype = momentum_dtype or weight_of(p).dtype
            # What PyTorch restored has been through the parameter's dtype.
            if momentum is not None and (factor != 1.0 or dtype != p.dtype):
                wide = torch.promote_types(momentum.dtype, dtype)
                state[p]["momentum_buffer"] = momentum.to(p.device, wide).mul(factor).to(dtype)

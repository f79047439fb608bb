"""From a model's parameters to checked groups: which are matrices, how they lie, and the table that says so."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from glob import escape
from logging import getLogger
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_tune import checks
from dmuon_tune.errors import UsageError
from dmuon_tune.matrices import Selection, select, unmatched
from dmuon_tune.words import counted, name_patterns, shown, table

from .blocks import Split, blocks_of, check_split
from .distributed.whole import weight_of
from .eager import EagerAdamW
from .overlaps import overlapping
from .scales import SCALES

MOMENTUM_FORMS = ("accumulate", "ema")
# Of AdamW's groups only "momentum" stays, unused: OneCycleLR and CyclicLR set it in every group or in none.
MATRIX_OPTIONS = ("momentum_form", "nesterov", "cautious", "scale", "split", "split_dim", "flatten")
# What step reads of a group of matrices.
NEEDED_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "cautious", "scale", "momentum_form", "maximize")
FIXED_OPTIONS = ("use_muon", "split", "split_dim", "flatten")

logger = getLogger("dmuon_tune.runtime")


@cache
def needed_options(use_muon: bool) -> tuple[str, ...]:
    """What step reads of a group."""
    return NEEDED_OPTIONS if use_muon else tuple(EagerAdamW([torch.zeros(1)]).defaults)


def groups_of(
    module: nn.Module, include: Sequence[str], exclude: Sequence[str], flatten: Sequence[str],
    splits: Mapping[str, Split],
) -> tuple[list[dict[str, Any]], str]:
    """A module's parameters as groups, each (name, parameter) in the module's order, and the table of them.

    First the matrices as they are, then those of each way to be flattened or split, last AdamW's.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad or p.is_floating_point()}
    for unused in unmatched([*include, *exclude, *flatten, *splits], named):
        logger.warning("pattern %r matches no parameter of %s", unused, type(module).__name__)
    flat = {name for name, p in named.items() if p.ndim > 2 and _first_match(flatten, name)}
    shapes = {name: (p.shape[0], prod(p.shape[1:])) if name in flat else tuple(p.shape) for name, p in named.items()}
    selection = select(shapes.items(), [*include, *map(escape, flat)], exclude)
    by_layout: dict[tuple[Split, bool], list[tuple[str, Tensor]]] = defaultdict(list)
    by_layout[Split(()), False] = []
    for matrix in selection.matrices:
        pattern = _first_match(splits, matrix.name)
        layout = splits[pattern] if pattern else Split(()), matrix.name in flat
        by_layout[layout].append((matrix.name, named[matrix.name]))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "use_muon": True, "split": split.sizes, "split_dim": split.dim, "flatten": flattened}
        for (split, flattened), matrices in by_layout.items() if matrices
    ]
    rest = [(left.name, named[left.name]) for left in selection.left_out]
    if rest:
        groups.append({"params": rest, "use_muon": False})
    if not groups:
        raise UsageError(f"{type(module).__name__} has no parameters to optimize")
    return groups, _table(groups, selection)


def _first_match(patterns: Sequence[str] | Mapping[str, Any], name: str) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _table(groups: list[dict[str, Any]], selection: Selection) -> str:
    reasons = {left.name: left.reason for left in selection.left_out}
    rows: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for group in groups:
        for name, p in group["params"]:
            shape, how = "x".join(map(str, p.shape)) or "scalar", reasons.get(name, "matrix")
            if group["use_muon"]:
                cut, dim = group["split"], ("rows", "columns")[group["split_dim"]]
                kinds = (
                    counted(p.shape[0], "matrix", "matrices") if p.ndim == 3 and not group["flatten"] else "",
                    "flattened" if group["flatten"] else "", f"{dim} cut into {'+'.join(map(str, cut))}" if cut else "",
                )
                how = ", ".join(filter(None, kinds)) or how
            rows["Muon" if group["use_muon"] else "AdamW", shape, how].append(name)
    return table(
        ["optimizer", "shape", "count", "as", "parameters"],
        [[optimizer, shape, len(names), how, name_patterns(names)] for (optimizer, shape, how), names in rows.items()],
    )


def splits_of(given: Any) -> dict[str, Split]:
    """Pattern → split, of what the caller gave: sizes of rows, or a Split; UsageError where it is none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise UsageError(f"splits must be a mapping from patterns to sizes, not {shown(given)}")
    found = {pattern: split if isinstance(split, Split) else Split(split) for pattern, split in given.items()}
    for pattern, split in found.items():
        check_split(f"splits[{pattern!r}]", split.sizes, split.dim)
        if not split.sizes:
            raise UsageError(f"splits[{pattern!r}] must have at least one size, not none")
    return {pattern: Split(tuple(split.sizes), split.dim) for pattern, split in found.items()}


def name_of(group: Mapping[str, Any], index: int, position: int) -> str:
    """A parameter as messages name it: by its name, or by its place in group ``index``."""
    names = group.get("param_names")
    shape = "x".join(map(str, group["params"][position].shape))
    return f"parameter {names[position]!r}" if names else f"parameter {position} of group {index} ({shape})"


def check_last_group(groups: list[dict[str, Any]]) -> None:
    """UsageError, with the group's index or the parameters' names, for what cannot be used of the last of these."""
    index, group = len(groups) - 1, groups[-1]
    check_options(group, f"group {index}: ", wait=True)
    for position, p in enumerate(group["params"]):
        name = name_of(group, index, position)
        reason = unwritable(weight_of(p))
        if reason is not None:
            raise UsageError(f"{name}: {reason}")
        if group["use_muon"]:
            blocks_of(p, group, name)
        elif not p.is_floating_point():
            raise UsageError(f"{name}: AdamW needs real floating-point weights here, not {p.dtype}; leave it out")
    met = overlapping([each["params"] for each in groups])
    if met is not None:
        one, other = (name_of(groups[index], index, position) for index, position in met)
        raise UsageError(f"{one} and {other} share memory; give each its own, or tie them as one parameter")


def check_options(group: Mapping[str, Any], where: str, wait: bool) -> None:
    """UsageError for an option that cannot be used; ``where`` stands in front of its name.

    Without ``wait``, at each step, a number on a device is not read, and a learning rate may be below 0, where
    schedules' rounding can leave it.
    """
    for option in needed_options(group["use_muon"]):
        if option not in group:
            raise UsageError(f"{where}{option} is missing; set it in the group again")
    if not wait:
        group = {name: 0.0 if _on_device(value) else value for name, value in group.items()}
        group["lr"] = abs(group["lr"]) if checks.is_number(group["lr"]) else group["lr"]
    checks.flag(f"{where}maximize", group["maximize"])
    if not group["use_muon"]:
        check_adamw(group, where)
        if group["differentiable"]:
            raise UsageError(f"{where}differentiable must be False, not {shown(group['differentiable'])}")
        return
    for option in ("lr", "weight_decay"):
        checks.number(where + option, group[option])
    checks.number(f"{where}momentum", group["momentum"], below=1.0)
    for option in ("nesterov", "cautious", "flatten"):
        checks.flag(where + option, group[option])
    checks.one_of("scale", group["scale"], SCALES, where)
    checks.one_of("momentum_form", group["momentum_form"], MOMENTUM_FORMS, where)
    check_split(f"{where}split", group["split"], group["split_dim"])


def check_fixed(group: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    """UsageError where one of FIXED_OPTIONS is no longer what it was when the group was added."""
    for option, value in fixed.items():
        now = group.get(option)
        if type(now) is not type(value) or now != value:
            raise UsageError(
                f"{where}{option} cannot change once a group is added; set it back to {shown(value)}, or make the "
                "optimizer anew"
            )


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def check_adamw(options: Mapping[str, Any], where: str) -> None:
    """UsageError for AdamW's lr, betas, eps, weight_decay; ``where`` stands in front of the option's name."""
    for option in ("lr", "weight_decay", "eps"):
        checks.number(where + option, options[option])
    betas = options["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise UsageError(f"{where}betas must be two numbers in [0, 1), not {shown(betas)}")
    for place, beta in enumerate(betas):
        checks.number(f"{where}betas[{place}]", beta, below=1.0)


def unwritable(tensor: Tensor) -> str | None:
    """Why a tensor cannot be updated where it lies: it is sparse, or several of its elements are one in memory."""
    if tensor.layout != torch.strided:
        return f"it is sparse ({tensor.layout}), and dense tensors are needed here"
    if tensor.is_contiguous():
        return None
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return "its elements share memory (as after expand()); make it a clone()"
            reach += stride * (size - 1)
    return None


def unusable(p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> str | None:
    """Why a parameter cannot be updated: how it lies, its gradient, or state that is not a state of it."""
    if _is_usual(p, p.grad, state, group):
        return None
    reason = unwritable(weight_of(p))
    if reason is not None:
        return reason
    by_muon = group["use_muon"]
    if p.grad is not None and p.grad.layout != torch.strided:
        otherwise = "use AdamW for it after to_dense()" if by_muon else "call to_dense() on it"
        return f"its gradient is sparse ({p.grad.layout}), and dense ones are needed here; {otherwise}"
    reason = foreign(state, group)
    if reason is not None:
        return reason
    for key, value in state.items():
        if not isinstance(value, Tensor) or (value.ndim == 0 and key == "step"):
            continue
        if value.shape != p.shape:
            return f"its {key} is {tuple(value.shape)}, the parameter {tuple(p.shape)}: state of another model"
        if value.device != p.device:
            return (
                f"its {key} is on {value.device}, the parameter on {p.device}; move a model before its optimizer is "
                "made, or load the optimizer's state_dict again"
            )
        if not by_muon and value.is_floating_point() and value.dtype != p.dtype:  # AdamW's kernels take no mixture
            return (
                f"its {key} is {value.dtype}, the parameter {p.dtype}; convert a model before its optimizer is "
                "made, or load the optimizer's state_dict again"
            )
    return None


def _is_usual(p: Tensor, gradient: Tensor | None, state: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Whether a matrix lies as nearly all do, its momentum beside it: each step asks this of each one."""
    by_muon = group["use_muon"] and isinstance(state, dict) and len(state) == 1
    momentum = state.get("momentum_buffer") if by_muon else None
    return (
        isinstance(momentum, Tensor)
        and p.layout == momentum.layout == torch.strided
        and (gradient is None or gradient.layout == torch.strided)
        and weight_of(p).is_contiguous() and momentum.is_contiguous()
        and momentum.shape == p.shape and momentum.device == p.device
        and momentum.is_floating_point()
    )


def _moments(state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[str, ...]:
    """The tensors that a step updates beside the parameter; AdamW makes none where there is any state."""
    if group["use_muon"]:
        return ("momentum_buffer",) if "momentum_buffer" in state else ()
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ())) if state else ()


def foreign(state: Any, group: Mapping[str, Any]) -> str | None:
    """Why this is no state of any parameter of the group, its dtypes and its numbers."""
    if not isinstance(state, Mapping):
        return f"its state must be a mapping, not {shown(state)}"
    for key in _moments(state, group):
        value = state.get(key)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            found = value.dtype if isinstance(value, Tensor) else shown(value)
            return f"its {key} must be a real floating-point tensor, not {found}: state of another optimizer"
        reason = unwritable(value)
        if reason is not None:
            return f"its {key} cannot be updated: {reason}"
    if state and not group["use_muon"] and not _is_count(state.get("step")):
        return f"its step must be a number, not {shown(state.get('step'))}: state of another optimizer"
    mu = state.get("momentum_mu", 0.0)
    if not isinstance(mu, float) or not 0 <= mu < 1:
        return f"its momentum_mu must be a number in [0, 1), not {shown(mu)}"
    return None


def _is_count(value: Any) -> bool:
    """Whether AdamW can count its steps on with this."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1


def dtype_of(option: str, given: Any) -> torch.dtype | None:
    """UsageError unless None, or a floating-point dtype or its name."""
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if dtype is None and given is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise UsageError(f"{option} must be such as float32 or bfloat16, not {shown(given)}")
    return dtype


_printed: set[str] = set()


def print_once(table: str) -> None:
    """To stderr, by the first rank alone, and no table twice."""
    if table not in _printed and os.environ.get("RANK", "0") == "0":
        _printed.add(table)
        print(table, file=sys.stderr)


def warn_idle(parameters: Iterable[Tensor]) -> None:
    """Of a first step that has nothing to do: most likely modules have other parameters by now."""
    if all(p.grad is None for p in parameters):
        logger.warning(
            "no parameter has a gradient, and this step changes nothing; make the optimizer after fully_shard, or "
            "whatever else gives the model new parameters"
        )

"""Clips gradients by their global norm: every element of every layout counted once, in one reduction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dmuon_tune import checks
from dmuon_tune.errors import DmuonTuneError, UsageError
from dmuon_tune.words import counted, shown

from ..mode import check_group
from .coverage import Coverage, coverage_of
from .whole import check_reduced, is_elsewhere, keepers_of, whole_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor] | nn.Module | Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm, as one vector's, is at most ``max_norm``; returns what it was.

    As ``torch.nn.utils.clip_grad_norm_`` of the model that is not sharded. ``parameters`` may also be a module or an
    optimizer. Among them may be DTensors of several meshes and placements, dedicated matrices, whose gradients their
    owners have, and plain tensors, which are taken to be the same on every rank of ``process_group`` (default: all
    ranks): each of these has its part of every parameter. Where there are any but plain ones, all ranks call this
    together: one reduction of four numbers (inf: of two), and one more for each gradient that is still a partial sum.
    ``norm_type`` is p > 0 or inf. UsageError for what cannot be used, and where ranks do not have the same parameters,
    compared by shape and by a module's or an optimizer's names (but for inf, which is then the largest of all); a rank
    whose list has been agreed on does not wait to find that out: norm and gradients become NaN there. DmuonTuneError,
    with nothing changed, where ``error_if_nonfinite`` and the norm is NaN or infinite.
    """
    check_norm("max_norm", max_norm)
    check_norm("norm_type", norm_type)
    if float(norm_type) == 0:
        raise UsageError(f"norm_type must be a positive number or inf, not {shown(norm_type)}")
    check_group(process_group)
    named = _named(parameters)
    if any(keeper.early is not None for keeper in keepers_of(p for _, p in named)):
        raise UsageError(
            "clip_grad_norm_: owners have begun the step by these gradients as they are; run the backward without "
            "early_step, or give that max_norm"
        )
    norm, gradients = _measured(named, float(norm_type), process_group)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise DmuonTuneError(f"the gradients' norm is {norm.item()}: nothing was clipped; skip this step or lower the "
                             "loss scale")
    _scale(gradients, clip_factor(max_norm, norm))
    return norm


@torch.no_grad()
def clip_by_last_(
    optimizer: Optimizer, max_norm: float, last: Tensor | None, process_group: dist.ProcessGroup | None
) -> Tensor:
    """Scale an optimizer's gradients as ``max_norm`` asks of the norm ``last`` (None: of their own, and that is the
    last); collective as :func:`clip_grad_norm_`. Returns their own norm, or ``last`` where that is not finite."""
    norm, gradients = _measured(_named(optimizer), 2.0, process_group)
    _scale(gradients, clip_factor(max_norm, norm if last is None else last))
    before = torch.zeros_like(norm) if last is None else last.to(norm.device, norm.dtype)
    return torch.where(norm.isfinite(), norm, before)


def check_norm(option: str, value: Any) -> None:
    """UsageError for what is no norm."""
    if not checks.is_number(value) or not float(value) >= 0:
        raise UsageError(f"{option} must be a positive number or inf, not {shown(value)}")


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """By which gradients of this norm are multiplied."""
    return (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in PyTorch


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """A copy, multiplied as clipping does it."""
    return gradient * factor.to(gradient.device)


def _scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    for alike in _by_kind(map(_local, gradients)):
        torch._foreach_mul_(alike, factor.to(alike[0].device))


def _measured(
    named: list[tuple[str, Tensor]], power: float, process_group: dist.ProcessGroup | None
) -> tuple[Tensor, list[Tensor]]:
    """The norm of all gradients, and those that this rank has a part of."""
    found = [p for _, p in named]
    check_reduced(keepers_of(found))
    pairs = [(p, p.grad) for p in found if p.grad is not None and not is_elsewhere(p)]
    gradients = [gradient for _, gradient in pairs]
    if any(gradient.layout != torch.strided for gradient in gradients):
        raise UsageError("clip_grad_norm_: a gradient is sparse; give the embedding sparse=False")
    device = gradients[0].device if gradients else torch.device("cpu")
    kind = _divided(found)
    group = (process_group or dist.group.WORLD) if kind else None
    total = _total(pairs, power, group.size() if group else 1, device)
    if kind and group:
        coverage = None if math.isinf(power) else coverage_of(named, group, kind, _held)
        total = _reduced(total.to(kind), coverage, group).to(device)
    wide = [torch.promote_types(gradient.dtype, torch.float32) for gradient in gradients]
    norm = total if math.isinf(power) else total.pow(1 / power)
    return norm.to(max(wide, key=_bits, default=torch.float32)), gradients


def _reduced(total: Tensor, coverage: Coverage | None, group: dist.ProcessGroup) -> Tensor:
    """All ranks' sum, which is of every element once where they are covered; without coverage the largest."""
    if coverage is not None:
        summed = torch.cat((total[None], coverage.told))
        dist.all_reduce(summed, group=group)
        return coverage.checked(summed[0], summed[1:])
    largest = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), total.isnan()])  # which a MAX may drop
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return torch.where(largest[1] > 0, math.nan, largest[0])


def _named(parameters: Any) -> list[tuple[str, Tensor]]:
    """With their names, where the caller's object has some."""
    if isinstance(parameters, Optimizer):
        return [each for group in parameters.param_groups
                for each in zip(group.get("param_names") or [""] * len(group["params"]), group["params"], strict=True)]
    if isinstance(parameters, nn.Module):
        return list(parameters.named_parameters())
    given = (parameters,) if isinstance(parameters, Tensor) else parameters
    return [("", p) for p in checks.each_of("parameters", given, Tensor)]


def _divided(parameters: Iterable[Tensor]) -> str | None:
    """The kind of device between which parameters are divided; None where each is whole on every rank."""
    for p in parameters:
        whole, sharded = whole_of(p), _sharded([p])
        if whole is not None:
            return whole.weight.device.type
        if sharded:
            return str(sharded[0].device_mesh.device_type)  # the gradients may be offloaded
    return None


def _sharded(parameters: Iterable[Tensor]) -> list[DTensor]:
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed.tensor import DTensor

    return [p for p in parameters if isinstance(p, DTensor)]


def _local(tensor: Tensor) -> Tensor:
    found = _sharded([tensor])
    return found[0].to_local() if found else tensor


def _total(pairs: list[tuple[Tensor, Tensor]], power: float, size: int, device: torch.device) -> Tensor:
    """This rank's share of Σ|g|^p, or its largest |g|, in float64, of (parameter, g).

    Of ``size`` ranks that have their part of every tensor, size / (number of its shards) hold the same part; each of
    them counts that share of it.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for p, gradient in pairs:
        if whole_of(p) is not None:
            by_copies[1].append(gradient)
            continue
        shards, held = _held(gradient)
        if size % shards:
            cut = counted(shards, "shard")
            raise UsageError(f"clip_grad_norm_: a gradient of {tuple(gradient.shape)} in {cut} is not on all of "
                             f"{counted(size, 'rank')}; give the process_group that has every parameter")
        by_copies[size // shards].append(held)
    for copies, tensors in by_copies.items():
        for alike in _by_kind(tensors):
            wide = torch.promote_types(alike[0].dtype, torch.float32)
            norms = torch.stack(torch._foreach_norm(alike, power, dtype=wide)).double().to(device)
            total = torch.maximum(total, norms.max()) if math.isinf(power) else total + norms.pow(power).sum() / copies
    return total


def _held(gradient: Tensor) -> tuple[int, Tensor]:
    """Into how many shards the tensor is cut, and this rank's; a partial sum is reduced for it."""
    found = _sharded([gradient])
    if not found:
        return 1, gradient
    whole = found[0]
    if any(placement.is_partial() for placement in whole.placements):
        from torch.distributed.tensor import Replicate

        whole = whole.redistribute(placements=[Replicate() if p.is_partial() else p for p in whole.placements])
    cut = [size for size, p in zip(whole.device_mesh.shape, whole.placements, strict=True) if not p.is_replicate()]
    return math.prod(cut), whole.to_local()


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those that are not empty, together where device and dtype are the same."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            kinds[tensor.device, tensor.dtype].append(tensor)
    return list(kinds.values())


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits

"""Which parameters of a model are dedicated, what units use them, and what of that cannot be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuon_tune import checks
from dmuon_tune.errors import UsageError

from ..blocks import Split, blocks_of
from ..distributed.control import Control
from ..distributed.options import check_alike
from ..distributed.whole import whole_of
from ..parameters import dtype_of, groups_of, splits_of
from .grid import Grid
from .owners import Candidate
from .rule import UnsuitableError

REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ROOT = "the model itself"  # as a unit


@dataclass(frozen=True)
class Chosen:
    """The parameters ``found``, the dtypes of computation and sums, and ``parts`` as :func:`units_of` has them."""

    found: dict[nn.Parameter, Candidate]
    dtypes: tuple[torch.dtype, torch.dtype]
    parts: list[tuple[str, nn.Module, list[nn.Parameter]]]
    grid: Grid

    def said(self) -> dict[str, Any]:
        """What all ranks must have alike."""
        return {
            "dedicated": [{"name": each.name, "dtype": str(each.dtype), "matrices": each.shapes}
                          for each in self.found.values()],
            **dict(zip(("param_dtype", "reduce_dtype"), map(str, self.dtypes), strict=True)),
            "units": [name for name, *_ in self.parts],
        }


def chosen_of(
    model: nn.Module, mesh: DeviceMesh, group: ProcessGroup, dtypes: Sequence[Any], units: Iterable[nn.Module] | None,
    include: Sequence[str], exclude: Sequence[str], splits: Mapping[str, Sequence[int] | Split] | None,
    flatten: Sequence[str],
) -> Chosen:
    """What ``dedicate`` is given, read; UsageError, by name, for what cannot be."""
    found = candidates_of(model, include, exclude, splits, flatten)
    compute, reduce = map(dtype_of, ("param_dtype", "reduce_dtype"), dtypes)
    return Chosen(found, dtypes_of(found, compute, reduce), units_of(model, units, found), Grid.of(mesh, group))


def agreed(
    control: Control, mode: str, options: Mapping[str, Any], choose: Callable[[], Chosen]
) -> tuple[Chosen | None, str]:
    """What ``choose`` returns, the same on all ranks; None, and why, where owners are to be gathered."""
    chosen, why = None, "it was asked to"
    error: Exception | None = None
    try:
        chosen = None if mode == "gather" else choose()
    except UnsuitableError as raised:
        why, error = str(raised), raised if mode == "dedicated" else None
    except Exception as raised:
        error = raised
    control.agree("dedicate", error=error)
    said = {"reason": why} if chosen is None else chosen.said()
    check_alike({"mode": mode, **options, "is gathered": chosen is None, **said}, control, "dedicate")
    return chosen, why


def candidates_of(
    model: nn.Module, include: Sequence[str], exclude: Sequence[str],
    splits: Mapping[str, Sequence[int] | Split] | None, flatten: Sequence[str],
) -> dict[nn.Parameter, Candidate]:
    """The matrices that need a gradient, as ``Muon`` finds them; UsageError, by name, for what cannot have an owner."""
    for option, patterns in (("include", include), ("exclude", exclude), ("flatten", flatten)):
        checks.strings(option, patterns, "patterns")
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise UnsuitableError(
            "DistributedDataParallel averages gradients itself; dedicate the module in it, and fully_shard the rest"
        )
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        names[p].append(name)
    found = {}
    groups, _ = groups_of(model, include, exclude, flatten, splits_of(splits))
    for group in groups:
        for name, p in group["params"] if group["use_muon"] else ():
            if p.requires_grad:
                if whole_of(p) is not None:
                    raise UsageError(f"{name}: it is dedicated already; call dedicate once")
                reason = _unsuitable(p, names[p])
                if reason is not None:
                    raise UnsuitableError(f"{name}: {reason}")
                found[p] = Candidate(name, p.dtype, tuple(blocks_of(p, group, name).shapes(p)))
    if not found:
        raise UnsuitableError(f"{type(model).__name__} has no matrices to dedicate; use fully_shard alone")
    return found


def _unsuitable(p: nn.Parameter, names: Sequence[str]) -> str | None:
    if isinstance(p, DTensor):
        return (
            "it is a DTensor: call dedicate before fully_shard; what tensor parallelism has cut stays with "
            "fully_shard and Muon alone"
        )
    if len(names) > 1:
        return f"it is tied to {', '.join(names[1:])}; leave it to fully_shard by exclude=, for dedicate and Muon"
    if p.is_meta:
        return "it is on the meta device; materialize the model before dedicate"
    return None


def dtypes_of(
    found: Mapping[nn.Parameter, Candidate], compute: torch.dtype | None, reduce: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    """That of computation and that of sums; UsageError where they cannot be told, or sums would overflow."""
    dtypes = {p.dtype for p in found}
    if compute is None and len(dtypes) > 1:
        raise UsageError(f"matrices are of {' and '.join(sorted(map(str, dtypes)))}; give param_dtype")
    compute = compute or next(iter(dtypes))
    reduce = reduce or compute
    if reduce not in REDUCE_DTYPES:
        raise UsageError(f"gradients cannot be averaged in {reduce}; give reduce_dtype=torch.float32")
    return compute, reduce


def units_of(
    model: nn.Module, given: Iterable[nn.Module] | None, found: Mapping[nn.Parameter, Candidate]
) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """(Name, module, its parameters) of each unit that has some, in the order in which they run; first, of the model
    itself, what is in no other."""
    named = dict(_entries(model)) if given is None else _named(model, given)
    innermost: dict[nn.Parameter, str] = {}
    for name, module in sorted(named.items(), key=lambda each: each[0].count(".")):
        innermost |= {p: name for p in module.parameters() if p in found}
    parts: dict[str, list[nn.Parameter]] = {ROOT: [], **{name: [] for name in named}}
    for p in found:
        parts[innermost.get(p, ROOT)].append(p)
    return [(name, named.get(name, model), some) for name, some in parts.items() if some]


def _entries(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The entries of the outermost ModuleLists and Sequentials."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        if is_list:
            yield prefix + name, child
        else:
            yield from _entries(child, f"{prefix}{name}.")


def _named(model: nn.Module, given: Iterable[nn.Module]) -> dict[str, nn.Module]:
    names = {module: name for name, module in model.named_modules()}
    units = checks.each_of("units", given, nn.Module)
    for unit in units:
        if unit not in names or unit is model:
            what = "the model itself" if unit is model else "no part of the model"
            raise UsageError(f"units: {type(unit).__name__} is {what}; give modules inside it")
    return {names[unit]: unit for unit in units}

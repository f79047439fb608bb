"""Whether an optimizer's parameters are distributed, over which ranks, and what it needs then."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, distributed, nn

from dmuon_tune import checks
from dmuon_tune.errors import UsageError
from dmuon_tune.words import shown

from .distributed.whole import whole_of
from .ownership_options import OwnershipOptions

if TYPE_CHECKING:
    from .distributed.gather import Gather
    from .muon import Muon


MODES = ("auto", "local", "gather", "dedicated")
INSTEAD = {
    "local": "make it for the module before it is wrapped or sharded",
    "gather": "call fully_shard on several ranks, without dedicate",
    "dedicated": "call dedicate(model, mesh) before fully_shard, and make Muon(model) after both",
}
MAX_TIMEOUT_S = 1e9  # gloo counts milliseconds in 64 bits, and timedelta ends somewhat later


class Choice(NamedTuple):
    """In which of the ``MODES`` a model's matrices are orthogonalized, and why."""

    mode: str
    why: str


_kept: WeakKeyDictionary[nn.Module, Choice] = WeakKeyDictionary()


def keep_choice(model: nn.Module, mode: str, why: str) -> None:
    """For an optimizer that is made for the model, or one that has it in it."""
    _kept[model] = Choice(mode, why)


def choice_kept(model: Any) -> Choice | None:
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return next((_kept[part] for part in parts if part in _kept), None)


def choice_of(asked: str, module: Any, parameters: Iterable[Tensor], is_alone: bool) -> Choice:
    """How an optimizer made for ``module`` (or groups) runs; UsageError where that is not as ``asked``."""
    checks.one_of("mode", asked, MODES)
    has_owners = any(whole_of(p) is not None for p in parameters)
    if has_owners:
        found = Choice("dedicated", "dedicate has given matrices owners")
    elif is_alone:
        found = Choice("local", "all parameters are whole in this process")
    else:
        found = Choice("gather", "parameters are shards or replicas, and none is dedicated")
    kept = choice_kept(module)
    if kept is not None and kept.mode == found.mode:
        found = kept
    if asked not in ("auto", found.mode):
        raise UsageError(f"mode {asked!r} is not this model's, which is {found.mode!r} ({found.why}); {INSTEAD[asked]}")
    return found


def gather_for(
    optimizer: Muon, module: Any, process_group: Any, bucket_bytes: int, timeout: float, profile: bool,
    ownership: OwnershipOptions | None,
) -> Gather | None:
    """The distributed part of an optimizer made for ``module`` (or groups), as its options say; None in one process."""
    checks.integer("bucket_bytes", bucket_bytes)
    seconds = check_timeout(timeout)
    checks.flag("profile", profile)
    checks.instance("ownership", ownership, OwnershipOptions)
    group = group_for(module, optimizer._parameters(), process_group)
    if group is None:
        return None
    from .distributed.gather import Gather  # imports DTensor, which one process does without

    chains, dtype = optimizer._newton_schulz, optimizer._momentum_dtype
    return Gather(group, chains, dtype, bucket_bytes, seconds, profile, ownership or OwnershipOptions())


def check_timeout(given: float) -> float:
    """As seconds; UsageError for what is none."""
    if not checks.is_number(given) or not 0 < float(given) <= MAX_TIMEOUT_S:
        raise UsageError(f"timeout must be a number of seconds in (0, {MAX_TIMEOUT_S:g}], not {shown(given)}")
    return float(given)


def group_for(module: Any, parameters: Iterable[Tensor], given: Any) -> Any:
    """The process group whose ranks share the matrices; None for an optimizer of one process.

    ``given`` if there is one; else those that matrices are dedicated to, DistributedDataParallel's own, or all ranks
    where a parameter is a DTensor.
    Raises UsageError where there is no such group.
    """
    check_group(given)
    parameters = list(parameters)
    owning = {whole.group: None for whole in map(whole_of, parameters) if whole is not None}
    if len(owning) > 1 or (given is not None and any(group is not given for group in owning)):
        raise UsageError("process_group must be the ranks that the matrices are dedicated to; leave it out")
    if given is not None:
        return given
    if owning:
        return next(iter(owning))
    if isinstance(module, nn.Module):
        for part in module.modules():
            if type(part).__name__ == "FullyShardedDataParallel":
                raise UsageError(
                    "FullyShardedDataParallel flattens parameters, so that no matrix is left; shard the model with "
                    "fully_shard (FSDP2)"
                )
        if distributed.is_available() and isinstance(module, nn.parallel.DistributedDataParallel):
            return module.process_group
    tensors = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor
    if tensors is not None and any(isinstance(p, tensors.DTensor) for p in parameters):
        return distributed.group.WORLD
    return None


def check_group(given: Any) -> None:
    """UsageError for what is neither None nor a process group with this rank in it."""
    if given is None:
        return
    if not distributed.is_available():
        raise UsageError("process_group must be None, not a group: this PyTorch has no torch.distributed")
    if isinstance(given, int) and given == distributed.GroupMember.NON_GROUP_MEMBER:  # as new_group returns it
        raise UsageError("process_group must have this rank in it; call this on the group's ranks alone")
    checks.instance("process_group", given, distributed.ProcessGroup)

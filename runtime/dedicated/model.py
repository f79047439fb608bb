"""A model whose matrices are dedicated: its passes, and what checkpoints see of weights and momenta."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dmuon_tune.errors import UsageError

from ..distributed.control import Control
from ..distributed.early import Early
from ..distributed.whole import ATTRIBUTE, Whole
from ..eager import uncompiled
from ..ownership import Assignment
from .carrier import carrier_for
from .chosen import Chosen
from .others import watch
from .passes import Passes
from .unit import Member, Unit


class DedicatedModel:
    """Makes units of what is ``chosen``, in the order in which they run, and hooks them; after that these parameters,
    each with its owner, have no memory but their owner's.

    A checkpoint has each as the DTensor that ``fully_shard`` would make of it on ``mesh``: rows cut along its last
    dimension. ``state_dict`` and ``load_state_dict`` of the model are called by all ranks together.
    """

    def __init__(
        self, model: nn.Module, chosen: Chosen, owners: Mapping[nn.Parameter, int], reshard: bool, mesh: DeviceMesh,
        device: torch.device, control: Control, assignment: Assignment,
    ) -> None:
        self.assignment = assignment
        self._mesh, self._control, self._loaded = mesh, control, set[str]()  # keys that a load has taken
        self._is_checked, self.step = False, 1
        names = {p: each.name for p, each in chosen.found.items()}
        members = {p: Member(self._whole(p, names[p], owner, device), p) for p, owner in owners.items()}
        units = []
        for place, (name, module, some) in enumerate(chosen.parts):
            # A backward begins with the last: it would come at once.
            stays = not reshard or module is model or place == len(chosen.parts) - 1
            unit = Unit(name, [members[p] for p in some], *chosen.dtypes, device, chosen.grid, stays)
            units.append((unit, module))
        self._units = [unit for unit, _ in units]
        self._carrier = carrier_for(control, chosen.grid, device)
        self._carrier.follow()
        self._passes = Passes(model, units, self._carrier, control)
        model.register_forward_pre_hook(self._check, prepend=True)
        watch()
        part: Any  # a module, whose methods have no types
        for part in model.modules():
            own = {name: members[p] for name, p in part._parameters.items() if p in members}
            if own:
                part.register_state_dict_post_hook(partial(self._saved, own))
                part.register_load_state_dict_pre_hook(partial(self._taken, own))
                part.register_load_state_dict_post_hook(self._complete)

    def _whole(self, p: nn.Parameter, name: str, owner: int, device: torch.device) -> Whole:
        """What this rank keeps of a parameter, which is still as the caller has made it."""
        is_here = owner == self._control.rank
        weight = (p.detach() if is_here else p.detach()[:0]).to(device, copy=True).contiguous()
        mark = torch.zeros((), dtype=p.dtype, device=device).expand(p.shape)
        whole = Whole(name, owner, self._control.group, weight, mark, self, is_here)
        setattr(p, ATTRIBUTE, whole)
        p.__deepcopy__ = partial(_refuse_copy, name)  # type: ignore[method-assign]
        p.is_contiguous = partial(_is_contiguous, p)  # type: ignore[method-assign]
        return whole

    @uncompiled
    def _check(self, model: nn.Module, arguments: Any) -> None:
        """Before a forward: modules that do not have what is dedicated would compute with something else."""
        kept = set() if self._is_checked else set(model.parameters())
        for unit in self._units:
            for whole, p in unit.members:
                if not self._is_checked and p not in kept:
                    raise UsageError(
                        f"{whole.name} was dedicated, and has been replaced since; change a model before dedicate, and "
                        "call fully_shard with ignored_params= of what dedicate returned"
                    )
                if p.dtype != unit.flat.dtype or p.device != unit.flat.device:
                    raise UsageError(
                        f"{whole.name} is dedicated, and was converted to {p.dtype} on {p.device} since; convert a "
                        "model before dedicate, or give it param_dtype"
                    )
        self._is_checked = True

    def release(self) -> None:
        """See :class:`Keeper`."""
        self._passes.settle()
        self._passes.undo()
        self._passes.release()

    @property
    def step(self) -> int:
        """See :class:`Keeper`."""
        return self._control.step

    @step.setter
    def step(self, count: int) -> None:
        self._control.step = count

    @property
    def early(self) -> Early | None:
        """See :class:`Keeper`."""
        return self._passes.early

    @early.setter
    def early(self, given: Early | None) -> None:
        self._passes.early = given

    def set_reduces(self, now: bool) -> bool:
        """See :class:`Keeper`."""
        before, self._passes.reduces = self._passes.reduces, now
        return before

    def unreduced(self) -> str | None:
        """See :class:`Keeper`."""
        self._passes.settle()
        for unit in self._units:
            for place in unit.sums.waiting | unit.sums.lost:
                if unit.members[place].p.grad is not None:
                    return unit.members[place].whole.name
        return None

    def spread(self, whole: Whole, value: Tensor) -> Tensor:
        """A new DTensor; see :class:`Keeper`."""
        full = value if whole.is_here else value.new_empty(whole.mark.shape)
        self._carrier.spread(full, whole.owner, f"state of {whole.name}")
        shards, at = self._mesh.size(self._mesh.ndim - 1), self._mesh.get_local_rank(self._mesh.ndim - 1)
        parts = full.chunk(shards)
        local = parts[at].clone() if at < len(parts) else full[:0].clone()
        placements = [*[Replicate()] * (self._mesh.ndim - 1), Shard(0)]
        found: Tensor = DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        return found

    def collect(self, whole: Whole, value: Tensor) -> Tensor | None:
        """The owner's tensor of a DTensor, or of what is whole on every rank; collective."""
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return full if whole.is_here else None

    @uncompiled
    @torch.no_grad()
    def _saved(
        self, own: dict[str, Member], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Put the owners' weights where the module has put views of memory that is not there."""
        self._passes.undo()
        self._control.agree(f"state_dict of {prefix}{next(iter(own))}")
        for name, (whole, _) in own.items():
            if prefix + name in state:
                state[prefix + name] = self.spread(whole, whole.weight)

    @uncompiled
    @torch.no_grad()
    def _taken(
        self, own: dict[str, Member], module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any],
        strict: bool, missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:
        """Let the owners take their weights out of a state dict; a key that is missing is the module's to name."""
        forms, error = dict[str, str](), None
        for name, (whole, _) in own.items():
            value = state.get(prefix + name)
            if value is None:
                continue
            forms[name] = "whole" if not isinstance(value, DTensor) else "sharded"
            if not isinstance(value, Tensor) or value.shape != whole.mark.shape:
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                error = UsageError(f"{whole.name} is {tuple(whole.mark.shape)}, in the state dict {found}")
            elif metadata.get("assign_to_params_buffers"):
                error = UsageError(f"{whole.name} has an owner; load it without assign=True")
        every = self._control.gather(forms, f"load_state_dict of {prefix}{next(iter(own))}", error)
        if any(other != forms for other in every):
            raise UsageError(f"ranks load {prefix}{next(iter(own))} in other forms; give all the same state dict")
        self.release()
        for name in forms:
            whole, value = own[name].whole, self.collect(own[name].whole, state.pop(prefix + name))
            if value is not None:
                whole.weight.copy_(value)
            self._loaded.add(prefix + name)
        self._carrier.follow()

    def _complete(self, module: nn.Module, incompatible: Any) -> None:
        """Say of no key that it is missing that a hook has taken."""
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if key not in self._loaded]
        self._loaded.clear()


def _refuse_copy(name: str, memo: Any) -> NoReturn:
    raise UsageError(f"{name} is dedicated, and cannot be copied; copy the model's state_dict() instead")


def _is_contiguous(p: nn.Parameter, *arguments: Any, **named: Any) -> bool:
    """Of the parameter; ``fully_shard`` asks, and is to leave it alone."""
    found = Tensor.is_contiguous(p, *arguments, **named)
    if not found:
        name = getattr(p, ATTRIBUTE).name
        raise UsageError(
            f"{name} is dedicated, and not here; call fully_shard with ignored_params= of what dedicate returned"
        )
    return found

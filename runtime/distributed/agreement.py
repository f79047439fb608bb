"""One plan for all ranks: the first decides which kernels run, each builds its own, and what fails is decided anew."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dmuon_tune.backends import CompiledKernel
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Layers
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe
from dmuon_tune.space import config_to_dict
from dmuon_tune.spec import KernelSpec

from ..ends import BoundEnds, Ends, bind_ends
from ..newton_schulz import EndsKey, GramNewtonSchulz
from ..plan import GroupPlan, Plan, device_context, report_failures
from ..resolve import Binding, KernelFailure, Resolver
from .control import Control

Key = tuple[str, str, str]  # problem, kernel and configuration, as text
BY_SIZE = ("last", "direct", "weights", "with_identity")


@dataclass(frozen=True, order=True)
class Wanted:
    """A group that a rank runs; around its chain the dtype of gradients, momentum's mode (m, n), the weights' dtype,
    and whether its last product updates weights that lie here."""

    group: Group
    gradient_dtype: str
    mode: str
    dtype: str
    updates_weights: bool = False

    @classmethod
    def of(
        cls, group: Group, gradient_dtype: torch.dtype, mode: str, dtype: torch.dtype, updates_weights: bool = False
    ) -> Wanted:
        names = (str(each).removeprefix("torch.") for each in (gradient_dtype, dtype))
        return cls(group, next(names), mode, next(names), updates_weights)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Wanted:
        return cls(**{**fields, "group": Group(**fields["group"])})


class Agreement:
    """What runs on the ranks of ``control``. The caches are read by the first alone; what it decides travels as data.

    The others load or compile the kernels that they need by it, from artefacts of their own where they have them, and
    check what was measured elsewhere. A kernel that fails on any rank is replaced on all, as in one process.
    """

    def __init__(self, newton_schulz: GramNewtonSchulz, device: torch.device, control: Control) -> None:
        self._newton_schulz, self._device, self._control = newton_schulz, device, control
        self._fingerprint = fingerprint(str(device))
        self._broken: dict[Key, str] = {}  # why it does not run, by what failed on some rank
        self._decided: dict[Group, GroupPlan] = {}  # on the first rank
        self._made: dict[Key, Binding] = {}

    def prepare(self, wanted: Iterable[Wanted]) -> Plan:
        """Decide, build and keep what this rank wants; collective. Returns the plan of its groups.

        Raises on all ranks what resolving raises on the first, and whatever the library's kernel raises on any.
        """
        mine = list(dict.fromkeys(wanted))
        asked = self._control.gather([asdict(one) for one in mine], "batches")
        every = sorted({Wanted.from_dict(fields) for fields in sum(asked, [])})
        while True:
            decided = self._control.decide(lambda: self._decide(every), "plan")
            built, failures, error = None, list[tuple[Key, str]](), None
            try:
                built = self._build(decided, mine, failures)
            except Exception as raised:
                error = raised
            reported = self._control.gather(failures, "kernels", error)
            if not any(reported):
                break
            for rank, failed in zip(self._control.ranks, reported, strict=True):
                for (problem, kernel, config), reason in failed:
                    self._broken.setdefault((problem, kernel, config), f"{reason} (rank {rank})")
        assert built is not None
        plans, ends = built
        for group, planned in plans.items():
            self._newton_schulz.adopt(self._device, planned, ends[group])
        missing = tuple(map(Problem.from_dict, decided["missing"]))
        said = decided["command"], tuple(decided["failures"])
        return Plan(str(self._device), self._fingerprint, plans, missing, *said)

    def _decide(self, every: list[Wanted]) -> dict[str, Any]:
        """The kernels of all ranks as data; nothing is compiled."""
        known = {group: plan for group, plan in self._decided.items() if not self._hurt(plan)}
        new = [group for group in dict.fromkeys(one.group for one in every) if group not in known]
        with self._newton_schulz.looking_up() as found, device_context(self._device):
            layers = found.layers
            resolved = self._newton_schulz.resolve(new, self._device, self._pretend)
            resolver = Resolver(self._fingerprint, layers, use_nearest=False, build=self._pretend)
            for group, planned in resolved.groups.items():
                bindings = {
                    problem: resolver.library(problem) if _key(bound) in self._broken else bound  # a small form's
                    for problem, bound in planned.bindings.items()
                }
                known[group] = replace(planned, bindings=bindings)
            self._decided = known
            ends = [
                bind_ends(known[one.group], resolver, one.gradient_dtype, one.mode, one.dtype, one.updates_weights)
                for one in every
            ]
            return {
                "groups": [_plan_to_dict(known[group], layers) for group in dict.fromkeys(one.group for one in every)],
                "ends": [{**asdict(one), **_ends_to_dict(end, layers)} for one, end in zip(every, ends, strict=True)],
                "missing": [problem.to_dict() for problem in resolved.missing],
                "command": resolved.command,
                "failures": [*resolved.failures, *resolver.failures],
            }

    def _pretend(
        self, spec: KernelSpec, problem: Problem, config: Any, device: DeviceFingerprint
    ) -> CompiledKernel:
        """Stands for compiling where kernels are only chosen: fails where it is known to fail on some rank."""
        reason = self._broken.get(_key_of(problem, spec.name, config_to_dict(config)))
        if reason is not None:
            raise RuntimeError(reason)
        return CompiledKernel(_unbuilt)

    def _hurt(self, planned: GroupPlan) -> bool:
        return any(_key(bound) in self._broken for bound in planned.bindings.values())

    def _build(
        self, decided: dict[str, Any], mine: list[Wanted], failures: list[tuple[Key, str]]
    ) -> tuple[dict[Group, GroupPlan], dict[Group, dict[EndsKey, Ends]]]:
        """What this rank wants of the decision, with its own callables; ``failures`` takes those that it has not."""
        groups = {one.group for one in mine}
        plans: dict[Group, GroupPlan] = {}
        ends: dict[Group, dict[EndsKey, Ends]] = defaultdict(dict)
        with self._newton_schulz.looking_up() as found, device_context(self._device):
            resolver = Resolver(self._fingerprint, found.layers, use_nearest=False)

            def built(bound: Binding, now: bool = True) -> Binding:
                key = _key(bound)
                if key not in self._made:
                    try:
                        if not now:
                            return resolver.rebound_when_needed(bound)
                        self._made[key] = resolver.rebound(bound)
                    except KernelFailure as failure:
                        failures.append((key, str(failure)))
                        return bound
                return self._made[key]

            for fields in decided["ends"]:
                one = Wanted.from_dict({each.name: fields[each.name] for each in dataclasses.fields(Wanted)})
                if one in mine:
                    dtypes = getattr(torch, one.gradient_dtype), one.mode, getattr(torch, one.dtype)
                    ends[one.group][*dtypes, one.updates_weights] = _ends_from_dict(fields).mapped(built).ends()
            for fields in decided["groups"]:
                planned = _plan_from_dict(fields)
                if planned.recipe.group in groups:
                    # A whole recurrence has mostly an end in other dtypes that stands for it.
                    own = {problem: built(bound, problem.op != "polar_small")
                           for problem, bound in planned.bindings.items()}
                    plans[planned.recipe.group] = replace(planned, bindings=own)
            resolver.release()
            report_failures(resolver)
        return plans, ends


def _unbuilt(*arguments: Any) -> None:
    raise AssertionError("a kernel that was chosen but not built")


def _key(bound: Binding) -> Key:
    return _key_of(bound.problem, bound.kernel, bound.config)


def _key_of(problem: Problem, kernel: str, config: Mapping[str, Any]) -> Key:
    return problem.canonical_json(), kernel, json.dumps(dict(config), sort_keys=True)


def _plan_to_dict(planned: GroupPlan, layers: Layers) -> dict[str, Any]:
    bindings = [_binding_to_dict(bound, layers) for bound in planned.bindings.values()]
    return {"recipe": planned.recipe.to_dict(), "layer": planned.layer, "bindings": bindings}


def _plan_from_dict(fields: dict[str, Any]) -> GroupPlan:
    bound = map(_binding_from_dict, fields["bindings"])
    return GroupPlan(Recipe.from_dict(fields["recipe"]), fields["layer"], {each.problem: each for each in bound})


def _ends_to_dict(ends: BoundEnds, layers: Layers) -> dict[str, Any]:
    by_size = {
        name: [[size, _binding_to_dict(bound, layers)] for size, bound in getattr(ends, name).items()]
        for name in BY_SIZE
    }
    return {"first": ends.first and _binding_to_dict(ends.first, layers), **by_size}


def _ends_from_dict(fields: dict[str, Any]) -> BoundEnds:
    by_size = ({size: _binding_from_dict(bound) for size, bound in fields[name]} for name in BY_SIZE)
    return BoundEnds(fields["first"] and _binding_from_dict(fields["first"]), *by_size)


def _binding_to_dict(bound: Binding, layers: Layers) -> dict[str, Any]:
    """All but the callable; ``is_kept`` then says that it is to be checked where it runs: it was not measured here."""
    fields = {name: value for name, value in vars(bound).items() if name not in ("launch", "from_artefact")}
    to_check = bound.is_kept and not layers.was_measured_here(bound.key, bound.config)
    return {**fields, "problem": bound.problem.to_dict(), "config": dict(bound.config), "is_kept": to_check}


def _binding_from_dict(fields: dict[str, Any]) -> Binding:
    return Binding(**{**fields, "problem": Problem.from_dict(fields["problem"]), "launch": _unbuilt})

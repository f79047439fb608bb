"""Newton–Schulz orthogonalization of batches of equal matrices on a plan's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from dmuon_tune import checks
from dmuon_tune.backends import CompiledKernel
from dmuon_tune.cache import Layers
from dmuon_tune.coefficients import DEFAULT_COEFFICIENTS, CoefficientSet, Triple, coefficient_set
from dmuon_tune.errors import UsageError
from dmuon_tune.measure.build import compiled_kernel
from dmuon_tune.problem import DTYPES
from dmuon_tune.recipe import DEFAULT_STEPS, Group, default_dtype
from dmuon_tune.recipe import groups as cut
from dmuon_tune.restarts import choose_restarts
from dmuon_tune.words import counted, shown

from .ends import Ends, resolve_ends
from .execution import GroupChain, Momentum
from .lookups import LookUps
from .plan import GroupPlan, Plan, check_policy, device_context, plan, report_failures
from .static import Workspace

# What stands at a chain's ends: gradients' dtype, momentum's mode, the result's dtype, whether it updates weights.
EndsKey = tuple[torch.dtype, str, torch.dtype, bool]
Coefficients = str | CoefficientSet | tuple[Triple, ...] | list[Triple] | Triple


class GramNewtonSchulz:
    """``orthogonalize(X)``: the polar factor of each matrix of X, (..., rows, cols), in X's dtype.

    ``coefficients`` is a name of :data:`COEFFICIENTS`, a set, an (a, b, c) or a sequence of them; ``restarts`` are the
    steps (from 0) before which the Gram form returns to X (default: those that ``restarts.choose_restarts`` finds);
    ``dtype`` is the chain's arithmetic (default: float16 on a GPU, float32 on a CPU) with fp32 accumulation; ``eps`` is
    added to norm_factor · ‖X‖_F (the small form knows none). With 0, the default, the result does not depend on the
    scale of X: norms from 1e-33 to 1e33 are exact (float64 has no such limit), zero matrices give zero, NaN and inf
    give NaN in their matrix. Kernels come from ``plan``, or, when a shape or a dtype first comes, from the caches in
    ``layers`` (default: those of this machine) with ``on_miss`` as in :func:`plan`. On a GPU the products are replayed
    from the second call of a shape on as a CUDA graph, unless ``graphs`` is False; a call inside a capture of your own
    is captured launch by launch. A tall matrix is never transposed by a copy. A pickle or deep copy resolves its
    kernels anew, from the caches of the machine where it lands. Threads may share one: their calls wait for each other.
    """

    def __init__(
        self,
        coefficients: Coefficients = DEFAULT_COEFFICIENTS,
        steps: int = DEFAULT_STEPS,
        restarts: Sequence[int] | None = None,
        dtype: str | torch.dtype | None = None,
        plan: Plan | None = None,
        layers: Layers | None = None,
        on_miss: str | None = None,
        eps: float = 0.0,
        graphs: bool = True,
    ) -> None:
        self.coefficients = coefficient_set(coefficients)
        self.triples = self.coefficients.take(steps)
        if restarts is None:
            restarts = choose_restarts(self.coefficients, steps)
        self.restarts = checks.restarts(restarts, steps)
        checks.number("eps", eps)
        checks.flag("graphs", graphs)
        checks.instance("plan", plan, Plan)
        checks.instance("layers", layers, Layers)
        self.eps = float(eps)
        self.graphs = graphs
        self.dtype = str(dtype).removeprefix("torch.") if dtype is not None else None
        if self.dtype not in (None, *DTYPES):
            raise UsageError(f"unsupported dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if on_miss not in (None, ""):
            check_policy(on_miss)
        self._layers = layers
        self._lookups: LookUps | None = None
        self._on_miss = on_miss
        self._planned: dict[tuple[torch.device, Group], GroupPlan] = {}
        self._workspaces: dict[torch.device, Workspace] = {}
        self._chains: dict[tuple[torch.device, Group], GroupChain] = {}
        self._ends: dict[tuple[Any, ...], Ends] = {}
        self._parts: dict[tuple[Any, ...], list[tuple[slice, GroupChain, Ends]]] = {}
        self._lock = RLock()  # calls share the work buffers
        if plan is not None:
            self._check_given(plan)

    @property
    def steps(self) -> int:
        return len(self.triples)

    def __call__(self, x: Tensor) -> Tensor:
        """The polar factors of ``x``, (..., rows, cols), as a new tensor of x's dtype; x itself is not changed."""
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            given = f"one of {x.layout}" if isinstance(x, Tensor) else shown(x)
            raise UsageError(f"Newton–Schulz needs a dense tensor, not {given}")
        device = x.device
        key = x.shape, x.dtype, device
        with self._lock, device_context(device):
            parts = self._parts.get(key)
            if parts is None:
                parts = self._parts[key] = self._parts_of(x)
            result = torch.empty(x.shape, dtype=x.dtype, device=device)
            if len(parts) == 1:
                ((_, chain, ends),) = parts
                chain.polar(x, ends, result)
            elif parts:
                matrices, polars = (t if t.ndim == 3 else t.reshape(-1, *t.shape[-2:]) for t in (x.detach(), result))
                for part, chain, ends in parts:
                    chain.polar(matrices[part], ends, polars[part])
        return result

    def _parts_of(self, x: Tensor) -> list[tuple[slice, GroupChain, Ends]]:
        """What a tensor like this one is cut into: each part's place, chain and ends."""
        if x.ndim < 2 or 0 in x.shape[-2:]:
            raise UsageError(f"Newton–Schulz needs (..., rows, cols) with rows, cols >= 1, not {tuple(x.shape)}")
        if not x.is_floating_point():
            raise UsageError(f"Newton–Schulz needs a real floating-point tensor, not {x.dtype}")
        rows, cols = x.shape[-2:]
        cut = cut_batch(x.numel() // (rows * cols), rows, cols)
        return [(part, *self._bound(group, x.device, x.dtype, "none", x.dtype, False)) for part, group in cut]

    @contextmanager
    def looking_up(self) -> Iterator[LookUps]:
        """Inside it look-ups share what they open, read and check; each alone does so anew."""
        with self._lock:
            if self._lookups is not None:
                yield self._lookups
                return
            self._lookups = LookUps(self._layers)
            try:
                yield self._lookups
            finally:
                self._lookups.close()
                self._lookups = None

    def plan_for(self, groups: Sequence[Group], device: torch.device) -> Plan:
        """Resolve these groups now, so that a later call finds them in memory; returns their plan."""
        resolved = self.resolve(groups, device)
        for group, planned in resolved.groups.items():
            self._planned.setdefault((device, group), planned)
        return resolved

    def resolve(
        self, groups: Sequence[Group], device: torch.device, build: Callable[..., CompiledKernel] = compiled_kernel
    ) -> Plan:
        """The plan of these groups, which is not kept; ``build`` as in :func:`plan`."""
        with_dtype = self.dtype or default_dtype(device.type)
        with self.looking_up() as found:
            return plan(
                groups, str(device), with_dtype, found.layers, self._on_miss, self.steps, self.restarts, build
            )

    def adopt(self, device: torch.device, planned: GroupPlan, ends: Mapping[EndsKey, Ends]) -> None:
        """Run a group's :meth:`directions` and :meth:`step` as was decided elsewhere."""
        group = planned.recipe.group
        with self._lock:
            if self._planned.setdefault((device, group), planned).recipe != planned.recipe:
                self._planned[device, group] = planned
                self._chains.pop((device, group), None)
                self._parts.clear()
                self._ends = {key: found for key, found in self._ends.items() if key[:2] != (device, group)}
            for key, found in ends.items():
                self._ends[device, group, *key] = found
                self._parts.clear()

    def planned(self, group: Group, device: torch.device) -> GroupPlan:
        """How this group runs, resolved when it first comes."""
        if (device, group) not in self._planned:
            self.plan_for([group], device)
        return self._planned[device, group]

    def prepare(
        self, group: Group, device: torch.device, dtype: torch.dtype, mode: str, out_dtype: torch.dtype
    ) -> None:
        """Resolve now what :meth:`step` needs besides a group's plan: gradients of ``dtype``, weights of ``out_dtype``,
        momentum of ``mode`` (m, n)."""
        with self._lock, device_context(device):
            self._bound(group, device, dtype, mode, out_dtype, True)

    def step(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], momentum: Momentum,
        rates: Sequence[tuple[float, float]], first_place: int = 0,
    ) -> None:
        """Update momentum and weights: M, U as ``momentum`` says, W ← decay·W − rate·polar(U).

        All are equal matrices (rows, cols) on one device, one a weight; ``rates`` are (decay, rate) of each.
        ``first_place``: that of the first of its batches among all equal ones that are run in turn.
        """
        device, (rows, cols) = weights[0].device, weights[0].shape
        key = len(weights), rows, cols, device, gradients[0].dtype, momentum.mode, weights[0].dtype
        with self._lock, device_context(device):
            parts = self._parts.get(key)
            if parts is None:
                parts = self._parts[key] = [
                    (part, *self._bound(group, *key[3:], updates_weights=True))
                    for part, group in cut_batch(len(weights), rows, cols)
                ]
            for place, (part, chain, ends) in enumerate(parts, first_place):
                some = Momentum(momentum.mode, momentum.buffers[part], momentum.mu)
                matrices = tuple(map(Tensor.contiguous, gradients[part]))
                chain.step(matrices, some, ends, weights[part], rates[part], place)

    def directions(self, gradients: Sequence[Tensor], momentum: Momentum, out: Tensor) -> None:
        """Update momentum and write polar(U) of each matrix into ``out``, (batch, rows, cols), contiguous."""
        device = out.device
        with self._lock, device_context(device):
            for place, (part, group) in enumerate(cut_batch(len(out), *out.shape[1:])):
                chain, ends = self._bound(group, device, gradients[0].dtype, momentum.mode, out.dtype, False)
                some = Momentum(momentum.mode, momentum.buffers[part], momentum.mu)
                matrices = tuple(map(Tensor.contiguous, gradients[part]))
                chain.directions(matrices, some, ends, out[part], place)

    def _bound(
        self, group: Group, device: torch.device, dtype: torch.dtype, mode: str, out_dtype: torch.dtype,
        updates_weights: bool,
    ) -> tuple[GroupChain, Ends]:
        """A group's chain and the ends for these dtypes, resolved when they first come."""
        key = device, group, dtype, mode, out_dtype, updates_weights
        if key not in self._ends:
            with self.looking_up():
                planned = self.planned(group, device)
                self._ends[key] = self._resolved(planned, device, dtype, mode, out_dtype, updates_weights)
        if (device, group) not in self._chains:
            workspace = self._workspaces.setdefault(device, Workspace(device))
            self._chains[device, group] = GroupChain(
                self.planned(group, device), workspace, self.triples, self.coefficients, self.eps, self.graphs
            )
        return self._chains[device, group], self._ends[key]

    def _resolved(
        self, planned: GroupPlan, device: torch.device, dtype: torch.dtype, mode: str, out_dtype: torch.dtype,
        updates_weights: bool,
    ) -> Ends:
        with self.looking_up() as found:
            resolver = found.resolver(device)
            ends = resolve_ends(planned, resolver, _name(dtype), mode, _name(out_dtype), updates_weights)
            report_failures(resolver)
        return ends

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {
            "_planned": {}, "_workspaces": {}, "_chains": {}, "_ends": {}, "_parts": {}, "_layers": None,
            "_lookups": None,
        }
        return {name: value for name, value in self.__dict__.items() if name != "_lock"} | fresh

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock())

    def _check_given(self, given: Plan) -> None:
        device = torch.empty(0, device=given.device).device  # "cuda" becomes the current GPU's own name
        for group, planned in given.groups.items():
            recipe = planned.recipe
            if (recipe.steps, recipe.restarts) != (self.steps, self.restarts) or self.dtype not in (None, recipe.dtype):
                has, needs = counted(recipe.steps, "step"), counted(self.steps, "step")
                raise UsageError(
                    f"the plan was made for {has}, restarts {recipe.restarts}, {recipe.dtype}; "
                    f"this needs {needs}, restarts {self.restarts}, {self.dtype or 'the default dtype'}"
                )
            self._planned[device, group] = planned


@cache
def cut_batch(batch: int, rows: int, cols: int) -> tuple[tuple[slice, Group], ...]:
    """The groups that ``batch`` equal matrices are cut into, each with its place among them."""
    start, result = 0, []
    for group in cut([(rows, cols)] * batch):
        result.append((slice(start, start + group.batch), group))
        start += group.batch
    return tuple(result)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

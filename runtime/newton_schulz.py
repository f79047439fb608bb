"""Newton–Schulz orthogonalization of batches of equal matrices on a plan's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon_tune import chains
from dmuon_tune.cache import Layers
from dmuon_tune.coefficients import DEFAULT_COEFFICIENTS, CoefficientSet, Triple, coefficient_set
from dmuon_tune.errors import UsageError
from dmuon_tune.problem import DTYPES
from dmuon_tune.recipe import DEFAULT_RESTARTS, DEFAULT_STEPS, Group, default_dtype
from dmuon_tune.recipe import groups as cut

from .plan import GroupPlan, Plan, device_context, plan

Coefficients = str | CoefficientSet | tuple[Triple, ...] | list[Triple] | Triple


class GramNewtonSchulz:
    """``orthogonalize(X)``: the polar factor of each matrix of X, (..., rows, cols), in X's dtype.

    ``coefficients`` is a name of :data:`COEFFICIENTS`, a set, an (a, b, c) or a sequence of them; ``restarts`` are the
    steps (from 0) before which the Gram form returns to X; ``dtype`` is the chain's arithmetic (default: float16 on a
    GPU, float32 on a CPU) with fp32 accumulation; ``eps`` is added to the Frobenius norm. Kernels come from ``plan``,
    or, when a shape first comes, from the caches in ``layers`` (default: those of this machine) with ``on_miss`` as in
    :func:`plan`. A tall matrix is never transposed by a copy. Zero matrices give zero; NaN, inf and norms beyond 1e19
    (the range of fp32 squares; float64 input has no such limit) give NaN. A pickle or deep copy resolves its kernels
    anew, from the caches of the machine where it lands.
    """

    def __init__(
        self,
        coefficients: Coefficients = DEFAULT_COEFFICIENTS,
        steps: int = DEFAULT_STEPS,
        restarts: Sequence[int] = DEFAULT_RESTARTS,
        dtype: str | torch.dtype | None = None,
        plan: Plan | None = None,
        layers: Layers | None = None,
        on_miss: str | None = None,
        eps: float = 1e-7,
    ) -> None:
        self.coefficients = coefficient_set(coefficients)
        self.triples = self.coefficients.take(steps)
        self.restarts = tuple(sorted({step for step in restarts if step < steps}))
        if any(isinstance(step, bool) or not isinstance(step, int) or step < 1 for step in restarts):
            raise UsageError(f"restarts must be steps of at least 1 (counted from 0), not {tuple(restarts)!r}")
        if not 0.0 < eps < math.inf:
            raise UsageError(f"eps must be a positive number, not {eps!r}")
        self.eps = eps
        self.dtype = str(dtype).removeprefix("torch.") if dtype is not None else None
        if self.dtype not in (None, *DTYPES):
            raise UsageError(f"unsupported dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        self._layers = layers
        self._on_miss = on_miss
        self._planned: dict[tuple[torch.device, Group], GroupPlan] = {}
        self._buffers: dict[tuple[torch.device, torch.dtype, str], Tensor] = {}
        if plan is not None:
            self._check_given(plan)

    @property
    def steps(self) -> int:
        return len(self.triples)

    def __call__(self, x: Tensor) -> Tensor:
        """The polar factors of ``x``, (..., rows, cols), as a new tensor of x's dtype; x itself is not changed."""
        if x.ndim < 2 or 0 in x.shape[-2:]:
            raise UsageError(f"Newton–Schulz needs (..., rows, cols) with rows, cols >= 1, not {tuple(x.shape)}")
        if not x.is_floating_point():
            raise UsageError(f"Newton–Schulz needs a real floating-point tensor, not {x.dtype}")
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            with torch.no_grad():
                flat = result.view(-1, *x.shape[-2:])
                for start, polar in self.chunks(list(x.reshape(-1, *x.shape[-2:]).unbind())):
                    flat[start : start + len(polar)].copy_(polar)
        return result

    def plan_for(self, groups: Sequence[Group], device: torch.device) -> Plan:
        """Resolve these groups now, so that a later call finds them in memory; returns their plan."""
        with_dtype = self.dtype or default_dtype(device.type)
        resolved = plan(groups, str(device), with_dtype, self._layers, self._on_miss, self.steps, self.restarts)
        self._planned.update({(device, group): planned for group, planned in resolved.groups.items()})
        return resolved

    def chunks(self, matrices: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Orthogonalize equal matrices, each (rows, cols) on one device, batch by batch.

        Yields (index of the batch's first matrix, polar factors (batch, rows, cols) in the chain's dtype). The factors
        lie in a buffer that the next batch overwrites.
        """
        rows, cols = matrices[0].shape
        start = 0
        for group in cut([(rows, cols)] * len(matrices)):
            yield start, self._orthogonalize(group, matrices[start : start + group.batch])
            start += group.batch

    def _orthogonalize(self, group: Group, matrices: Sequence[Tensor]) -> Tensor:
        device = matrices[0].device
        planned = self._planned.get((device, group))
        if planned is None:
            self.plan_for([group], device)
            planned = self._planned[device, group]
        dtype = getattr(torch, planned.recipe.dtype)
        shape, square = (group.batch, group.rows, group.cols), (group.batch, group.m, group.m)
        x, y = (self._buffer(name, shape, dtype, device) for name in ("x", "y"))
        with device_context(device):
            self._normalize(matrices, x, chains.input_scale(group.m))
            form = planned.recipe.form
            squares = [self._buffer(f"s{i}", square, dtype, device) for i in range(chains.SQUARES[form])]
            launches = {key: bound.launch for key, bound in planned.bindings.items()}
            polar = chains.run(form, launches, x, y, squares, self.triples, planned.recipe.restarts)
        return polar

    def _normalize(self, matrices: Sequence[Tensor], out: Tensor, scale: float) -> None:
        """out = scale · U / (norm_factor · ‖U‖_F + eps), rounded once to the chain's dtype.

        Norms are fp32 (float64 for float64); where squares leave fp32's range the matrix becomes NaN, not zero.
        """
        stacked = torch.stack(list(matrices))
        if stacked.dtype == torch.float64:
            # Squares of float64 overflow from 1e154 on. clamp_min keeps a zero matrix zero; NaN and inf pass through.
            largest = stacked.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
            norms = largest * torch.linalg.vector_norm(stacked / largest, dim=(-2, -1), keepdim=True)
        else:
            stacked = stacked.float()
            norms = torch.linalg.vector_norm(stacked, dim=(-2, -1), keepdim=True)
        factors = scale / (norms * self.coefficients.norm_factor + self.eps) + 0.0 * norms  # 0·inf is NaN
        out.copy_(stacked.mul_(factors))

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous view of this shape of a buffer that all groups share; it grows to the largest of them."""
        size = math.prod(shape)
        held = self._buffers.get((device, dtype, name))
        if held is None or held.numel() < size:
            held = self._buffers[device, dtype, name] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planned": {}, "_buffers": {}, "_layers": None}

    def _check_given(self, given: Plan) -> None:
        device = torch.empty(0, device=given.device).device  # "cuda" becomes the current GPU's own name
        for group, planned in given.groups.items():
            recipe = planned.recipe
            if (recipe.steps, recipe.restarts) != (self.steps, self.restarts) or self.dtype not in (None, recipe.dtype):
                raise UsageError(
                    f"the plan was made for {recipe.steps} steps, restarts {recipe.restarts}, {recipe.dtype}; "
                    f"this needs {self.steps} steps, restarts {self.restarts}, {self.dtype or 'the default dtype'}"
                )
            self._planned[device, group] = planned

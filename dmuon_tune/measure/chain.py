"""A whole chain: a recipe's form, pieces and kernels, compiled, checked and timed together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from dmuon_tune import chains
from dmuon_tune.cache import ChainKey
from dmuon_tune.chains import Launch
from dmuon_tune.coefficients import DEFAULT_COEFFICIENTS, coefficient_set
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import polar_small
from dmuon_tune.kernel_specs.polar_small import input_scale
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import WEIGHTS_DTYPE, Recipe, first_launch
from dmuon_tune.spec import digest_of

from .build import compile_once
from .job import ChainJob
from .timing import time_warm
from .verify import addresses

MORE_ERROR = 1.1  # times the polar error of the plain form by the library on the same input
MOST_SAMPLES = 3  # different matrices in a batch; odd, so that no piece begins where the samples do
ALONE_FROM_M = 2048  # from here on a sample's float64 eigenvalues take a second: one for the whole batch
MU = 0.95  # Muon's default


@cache
def _code_digest() -> str:
    return digest_of((chains.__name__, polar_small.__name__))  # the latter for the scale that X enters with


def chain_key(recipe: Recipe, device: DeviceFingerprint) -> ChainKey:
    """The key of a chain's results: the recipe, its kernels' keys, the code that runs them, and the device."""
    return ChainKey(recipe, _code_digest(), device)


class BoundChain:
    """A recipe's compiled launches on one device, with the buffers that they work on.

    Where its picks have them, it begins with the first launch of an optimizer's step, from gradients, and ends in the
    dtype of weights. ``compiling`` is called before each compilation. Raises whatever a DSL raises.
    """

    def __init__(
        self, recipe: Recipe, fingerprint: DeviceFingerprint, device: str, compiling: Callable[[], None]
    ) -> None:
        self.recipe = recipe
        self._launches: dict[int, dict[tuple[str, str], Launch]] = {}
        endings: dict[int, Launch] = {}
        first: Launch | None = None
        products = recipe.products()
        for pick in recipe.picks:
            compiling()
            problem = pick.problem
            launch = compile_once(pick.kernel, problem, pick.config, fingerprint).launch
            if problem in products:
                self._launches.setdefault(problem.batch, {})[problem.op, problem.epilogue] = launch
            elif problem == first_launch(recipe.group, recipe.dtype):
                first = launch
            else:
                endings[problem.batch] = launch
        group, dtype = recipe.group, getattr(torch, recipe.dtype)

        def empty(batch: int, rows: int, cols: int) -> Tensor:
            return torch.full((batch, rows, cols), math.nan, dtype=dtype, device=device)

        self.x, self.y = (empty(group.batch, group.rows, group.cols) for _ in range(2))
        work = chains.work(recipe.form, max(recipe.pieces), group.m, recipe.dtype)
        self._buffers = [torch.zeros(a.shape, dtype=getattr(torch, a.dtype), device=device) for a in work]
        self._scratch = [buffer for buffer, a in zip(self._buffers, work, strict=True) if a.role == "scratch"]
        self._set = coefficient_set(DEFAULT_COEFFICIENTS)
        self._triples = self._set.take(recipe.steps)
        rows = chains.tables(recipe.form, self._triples, recipe.restarts, group.m)
        self._coefficients = [torch.tensor(each, dtype=torch.float32, device=device) for each in rows]
        self._ends = _Ends(self.x, first, endings, recipe.pieces, self._set.norm_factor) if first else None

    def load(self, gradients: Tensor, samples: Tensor) -> None:
        """Fill the batch with the samples, or with the gradients that they are of, in turn, and what a launch must
        write with NaN."""
        turns = torch.arange(len(self.x), device=self.x.device) % len(samples)
        self.x.copy_(samples[turns])
        for buffer in (self.y, *self._scratch):
            buffer.fill_(math.nan)
        if self._ends:
            self.x.fill_(math.nan)
            self._ends.load(gradients[turns])

    def __call__(self) -> Tensor:
        """The polar factors of the gradients, or of ``x``, which then holds something else; they are the next call's x.
        """
        ends = self._ends
        if ends:
            ends.begin(self.x)
        result = chains.run_pieces(
            self.recipe.form, self._launches, self.recipe.pieces, self.x, self.y, self._buffers, self._triples,
            self.recipe.restarts, self._coefficients, self._set.norm_factor, ends.ending if ends else None,
        )
        if ends:
            return ends.written(result)
        if result is self.y:
            self.x, self.y = self.y, self.x
        return result


class _Ends:
    """What an optimizer's step has around a chain on ``x``: gradients and momentum, each matrix at its own address, and
    a result in their dtype, by another kernel of the last product or by a copy."""

    def __init__(
        self, x: Tensor, first: Launch, endings: dict[int, Launch], pieces: Sequence[int], norm_factor: float
    ) -> None:
        self._first = first
        self._scale = input_scale(min(x.shape[1:])) / norm_factor
        dtype: torch.dtype = getattr(torch, WEIGHTS_DTYPE)
        self._gradients, self._momenta, self._out = (torch.empty_like(x, dtype=dtype) for _ in range(3))
        self._addresses = [addresses(each.unbind()) for each in (self._gradients, self._momenta)]
        self.ending = chains.Ending(endings, self._out) if endings.keys() >= set(pieces) else None

    def load(self, gradients: Tensor) -> None:
        """These gradients, and no momentum yet."""
        self._gradients.copy_(gradients)
        self._momenta.zero_()
        self._out.fill_(math.nan)

    def begin(self, x: Tensor) -> None:
        """From gradients to ``x``."""
        self._first(*self._addresses, x, MU, self._scale, 0.0)

    def written(self, result: Tensor) -> Tensor:
        """The chain's result in the dtype of the weights."""
        if result is self._out or result.dtype == self._out.dtype:
            return result
        return self._out.copy_(result)


def check_and_time(bound: BoundChain, job: ChainJob, resources: dict[str, Any]) -> Measurement:
    """Run the chain twice on buffers full of NaN, hold it against the exact polar factors, then time it warm."""
    recipe = bound.recipe
    group = recipe.group
    samples = min(group.batch, 1 if group.m >= ALONE_FROM_M else MOST_SAMPLES)
    yardstick = _yardstick((samples, group.rows, group.cols), recipe.dtype, recipe.steps, job.device)
    results = []
    for _ in range(2):
        bound.load(yardstick.u, yardstick.x)
        results.append(bound().clone())
    failure, error = "", math.nan
    if not bool(results[0].isfinite().all()):
        failure = "the result is not finite or was not written"
    else:
        error = _polar_error(results[0], yardstick.polar)
        allowed = yardstick.allowed + torch.finfo(results[0].dtype).eps / 2  # what rounding a result adds at most
        if error > allowed:
            failure = f"polar error {error:.3g} > {allowed:.3g}, {MORE_ERROR} of the plain form's"
        elif not torch.equal(*results):
            failure = "two runs on the same inputs differ"
    if failure:
        found = None if math.isnan(error) else error
        return Measurement("wrong_result", max_rel_err=found, resources=resources, log=failure)
    del results
    timing = time_warm(bound, job.device)
    resources = {**resources, **timing.facts(), "warm": True}
    return Measurement.from_samples(timing.samples_us, error, resources)


@dataclass(frozen=True)
class _Yardstick:
    """``u``: samples, fp32 but exact in bf16, as gradients are; ``x``: as chains take them; ``polar``: their polar
    factors, fp32; ``allowed``: a chain's polar error."""

    u: Tensor
    x: Tensor
    polar: Tensor
    allowed: float


@lru_cache(1)
def _yardstick(shape: tuple[int, int, int], dtype: str, steps: int, device: str) -> _Yardstick:
    """The same Gaussian samples for every chain of a group, so that what is costly is computed once a process."""
    rng = torch.Generator(device).manual_seed(0)
    u = torch.randn(shape, device=device, generator=rng).to(getattr(torch, WEIGHTS_DTYPE)).float()
    known = coefficient_set(DEFAULT_COEFFICIENTS)
    scale = input_scale(min(shape[1:]))
    x = u * (scale / (known.norm_factor * torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=True)))
    polar = torch.stack([_polar(sample) for sample in u])
    rounded = torch.float16 if dtype == "float32" else getattr(torch, dtype)
    plain = torch.stack([_plain(sample.to(rounded), known.take(steps), scale) for sample in x])
    return _Yardstick(u, x.to(getattr(torch, dtype)), polar, MORE_ERROR * _polar_error(plain, polar))


def _polar(u: Tensor) -> Tensor:
    """(UUᵀ)^(-1/2) U of one matrix, in float64, rounded to fp32."""
    wide = (u if u.shape[0] <= u.shape[1] else u.mT).double()
    values, vectors = torch.linalg.eigh(wide @ wide.mT)
    roots = values.clamp_min(float(values.max()) * torch.finfo(torch.float64).eps).rsqrt()
    polar: Tensor = ((vectors * roots) @ (vectors.mT @ wide)).float()
    return polar if u.shape[0] <= u.shape[1] else polar.mT


def _plain(x: Tensor, triples: Sequence[chains.Triple], scale: float) -> Tensor:
    """The plain form of one matrix: products of x's dtype accumulated in fp32, each result rounded once."""
    wide = x if x.shape[0] <= x.shape[1] else x.mT
    for a, b, c in triples:
        square = (wide.float() @ wide.float().mT).to(x.dtype).float()
        polynomial = (b / scale**2 * square + c / scale**4 * (square @ square)).to(x.dtype).float()
        wide = (a / scale * wide.float() + polynomial / scale @ wide.float()).to(x.dtype)
        scale = 1.0
    return wide if x.shape[0] <= x.shape[1] else wide.mT


def _polar_error(result: Tensor, polar: Tensor) -> float:
    """The largest ‖Y − polar‖_F / ‖polar‖_F of a batch that holds the samples' results in turn."""
    errors = [
        torch.linalg.vector_norm(result[place :: len(polar)].float() - exact, dim=(-2, -1)).max()
        / torch.linalg.vector_norm(exact)
        for place, exact in enumerate(polar)
    ]
    return float(torch.stack(errors).max())

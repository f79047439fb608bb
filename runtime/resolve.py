"""Finds the kernel that serves one problem: tuned, else by the miss policy, else the vendor library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from dmuon_tune import space
from dmuon_tune.backends import CompiledKernel, backends
from dmuon_tune.cache import CacheEntry, Layers
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import NoLegalConfigError
from dmuon_tune.kernel_specs import kernels, ops
from dmuon_tune.measure.build import compile_kernel, tuning_key
from dmuon_tune.measure.winners import contenders, library_kernel, winner
from dmuon_tune.problem import Problem, distance, same_code
from dmuon_tune.recipe import Pick
from dmuon_tune.spec import KernelSpec

# Untuned kernels, preferred first, where they beat the library on an H200 (2026-11-29): CuTe DSL's polar_small took 16
# us at 64x128x128 and 77 us at 12x256x1024; its apply took .90 of the library's time, the geometric mean of 29 shapes
# (1.09 at worst), and writes any dtype without a copy.
UNTUNED_FUSED = {
    "momentum": ("triton",), "polar_small": ("cutedsl", "triton"), "gram_span": ("cutedsl",), "apply": ("cutedsl",),
}
UNTUNED_UPDATE = ("cutedsl", "triton")  # of apply with the weights' update
# Untuned kernels of symmetric products, preferred first, each from the order m where it beat the library on an H200
# (2026-11-29): CuTe DSL 1.25x at 256, 1.6x at 768, 1.3x at 1024 and 2x at 4096, TileLang 1.3x at 4096 and slower than
# the library at 2048.
UNTUNED_FROM_M = {"cutedsl": 256, "tilelang": 4096}


@dataclass(frozen=True)
class Binding:
    """A problem and its callable; ``origin`` is tuned, nearest, heuristic or library, ``layer`` the cache's label."""

    problem: Problem
    origin: str
    layer: str
    kernel: str
    config: Mapping[str, Any]
    median_us: float | None
    launch: Callable[..., Any]


@dataclass(frozen=True)
class _Choice:
    origin: str
    spec: KernelSpec
    config: Any
    layer: str = ""
    median_us: float | None = None


class Resolver:
    """Binds problems on one device, each once; collects what was ``missing`` and which tuned kernels failed.

    ``build`` makes the callable, called as :func:`dmuon_tune.measure.build.compile_kernel` is.
    """

    def __init__(
        self,
        device: DeviceFingerprint,
        layers: Layers,
        use_nearest: bool,
        build: Callable[..., CompiledKernel] = compile_kernel,
    ) -> None:
        self._build = build
        self.device = device
        self.layers = layers
        self.bound: dict[Problem, Binding] = {}
        self._compiled_of: dict[tuple[Problem, str, str], Binding] = {}
        self.missing: list[Problem] = []
        self.failures: list[str] = []
        self._use_nearest = use_nearest
        self._every_entry: list[tuple[str, CacheEntry]] | None = None

    def bind(self, problem: Problem, pick: Pick | None = None, layer: str = "") -> Binding:
        """The problem's callable; NoLegalConfigError where not even the library serves it.

        ``pick`` is the kernel that a recipe of ``layer`` chose for it, taken while its code is today's.
        """
        picked = self._picked(pick, layer) if pick is not None and pick.problem == problem else None
        if picked is not None:
            binding = self._when_needed(problem, picked)
            self.bound.setdefault(problem, binding)
            return binding
        if problem not in self.bound:
            choice = self._choice(problem)
            if choice.origin != "tuned":
                self.missing.append(problem)
            self.bound[problem] = self._when_needed(problem, choice)
        return self.bound[problem]

    def bind_end(self, problem: Problem, like: Binding | None = None) -> Binding | None:
        """The callable of a chain's first or last launch, or None where the library's ways around it serve as well.

        Tuned; else the kernel and configuration of ``like``, the same product with another result; else the untuned
        kernel: of what is fused, or of a symmetric product, which the library serves as well. It is never ``missing``:
        a cache without it is complete.
        """
        choice = self._tuned(problem) or self._as(problem, like) or self._fused(problem)
        if choice is None and ops()[problem.op].symmetric_output:
            choice = self._untuned(problem)
        if choice is None:
            return None
        try:
            return self._compiled(problem, choice)
        except NoLegalConfigError:  # it did not compile, and the library does not serve it
            return None

    def flops(self, problem: Problem) -> int:
        """FLOPs of a product by the kernel that would serve it: the library computes a symmetric one in full."""
        op = ops()[problem.op]
        in_full = op.symmetric_output and self._choice(problem).spec.name == library_kernel(problem.op)
        return op.flops(problem) * (2 if in_full else 1)

    def untuned_fused(self, problem: Problem) -> bool:
        """Whether a recurrence, or a span of it, has an untuned kernel in one launch here."""
        return self._fused(problem) is not None

    def _choice(self, problem: Problem) -> _Choice:
        """What serves a problem: its tuned kernel, else by the miss policy."""
        tuned = self._tuned(problem)
        if tuned is not None:
            return tuned
        nearest = self._nearest(problem) if self._use_nearest else None
        return nearest or self._fused(problem) or self._untuned(problem)

    def _when_needed(self, problem: Problem, choice: _Choice) -> Binding:
        """Compiled now; a whole recurrence at its first launch, for a chain's ends have mostly one in other dtypes."""
        if problem.op != "polar_small":
            return self._compiled(problem, choice)
        compiled = cache(lambda: self._compiled(problem, choice).launch)
        return _binding(problem, choice, lambda *arguments: compiled()(*arguments))

    def _compiled(self, problem: Problem, choice: _Choice) -> Binding:
        key = problem, choice.spec.name, space.config_json(choice.config)
        if key not in self._compiled_of:
            self._compiled_of[key] = self._build_binding(problem, choice)
        return self._compiled_of[key]

    def _build_binding(self, problem: Problem, choice: _Choice) -> Binding:
        try:
            launch = self._build(choice.spec, problem, choice.config, self.device).launch
        except Exception as error:  # a DSL may raise anything; training goes on with the library and says so
            if choice.origin == "library":
                raise
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            self.failures.append(
                f"{choice.spec.name} failed to compile for {problem.label()}: {reason}; the library runs instead"
            )
            return self._compiled(problem, self._library(problem))
        return _binding(problem, choice, launch)

    def _picked(self, pick: Pick, layer: str) -> _Choice | None:
        spec = next((spec for spec in kernels(pick.problem.op) if spec.name == pick.kernel), None)
        if spec is None or not self._runs(spec, pick.problem):
            return None
        if tuning_key(spec, pick.problem, self.device).sha256 != pick.key:
            return None
        config = space.config_from_dict(spec.Config, pick.config)
        median_us = next(
            (
                entry.measurement.median_us
                for _, entry in self.layers.entries(pick.problem, self.device)
                if entry.key.sha256 == pick.key and entry.config == pick.config
            ),
            None,
        )
        return _Choice("tuned", spec, config, layer, median_us)

    def _as(self, problem: Problem, like: Binding | None) -> _Choice | None:
        if like is None:
            return None
        spec = next(spec for spec in kernels(like.problem.op) if spec.name == like.kernel)
        config = space.config_from_dict(spec.Config, dict(like.config))
        return _Choice(like.origin, spec, config, like.layer) if spec.is_legal(problem, config, self.device) else None

    def _fused(self, problem: Problem) -> _Choice | None:
        preferred = UNTUNED_UPDATE if problem.epilogue == "w" else UNTUNED_FUSED.get(problem.op, ())
        specs = {spec.backend: spec for spec in kernels(problem.op) if self._runs(spec, problem)}
        for backend in preferred:
            config = specs[backend].untuned(problem, self.device) if backend in specs else None
            if config is not None:
                return _Choice("heuristic", specs[backend], config)
        return None

    def _tuned(self, problem: Problem) -> _Choice | None:
        """The winner among the first layer's entries that are of today's kernels and toolchains."""
        specs = {spec.name: spec for spec in kernels(problem.op) if self._runs(spec, problem)}
        keys = {name: tuning_key(spec, problem, self.device).sha256 for name, spec in specs.items()}
        current: dict[str, list[CacheEntry]] = {}
        for label, entry in self.layers.entries(problem, self.device):
            if keys.get(entry.key.kernel) == entry.key.sha256 and entry.measurement.ok:
                current.setdefault(label, []).append(entry)
        if not current:
            return None
        label, entries = next(iter(current.items()))
        best = winner(contenders(entries, specs, self.device))
        assert best is not None
        spec = specs[best.key.kernel]
        config = space.config_from_dict(spec.Config, best.config)
        return _Choice("tuned", spec, config, label, best.measurement.median_us)

    def _nearest(self, problem: Problem) -> _Choice | None:
        """The configuration of the nearest shape tuned on this architecture, where it is legal for this problem."""
        if self._every_entry is None:
            self._every_entry = self.layers.entries(None, None)
        for _, label, entry in sorted(
            (
                (distance(problem, entry.key.problem), label, entry)
                for label, entry in self._every_entry
                if entry.key.device.arch == self.device.arch and same_code(problem, entry.key.problem)
            ),
            key=lambda found: (found[0], found[2].measurement.median_us),
        ):
            spec = next((spec for spec in kernels(problem.op) if spec.name == entry.key.kernel), None)
            if spec is None or not self._runs(spec, problem):
                continue
            try:
                config = space.config_from_dict(spec.Config, entry.config)
            except ValueError:  # an entry of another version of this kernel
                continue
            if spec.is_legal(problem, config, self.device):
                return _Choice("nearest", spec, config, label)
        return None

    def _untuned(self, problem: Problem) -> _Choice:
        """Without a measurement the library is the safe choice, but for large symmetric products on a GPU, where lower
        tiles alone halve the work."""
        if self.device.kind == "cuda" and ops()[problem.op].symmetric_output:
            specs = {spec.backend: spec for spec in kernels(problem.op) if self._runs(spec, problem)}
            for backend, fewest_m in UNTUNED_FROM_M.items():
                spec = specs.get(backend) if problem.m >= fewest_m else None
                config = spec.untuned(problem, self.device) if spec else None
                if spec and config is not None:
                    return _Choice("heuristic", spec, config)
        return self._library(problem)

    def _library(self, problem: Problem) -> _Choice:
        for spec in kernels(problem.op):
            config = spec.untuned(problem, self.device) if spec.name == library_kernel(problem.op) else None
            if config is not None:
                return _Choice("library", spec, config)
        raise NoLegalConfigError(f"no kernel runs {problem.label()} on {self.device.name}; see 'dmuon-tune doctor'")

    def _runs(self, spec: KernelSpec, problem: Problem) -> bool:
        backend = backends().get(spec.backend)
        return backend is not None and backend.unavailable(self.device) is None and spec.serves(problem, self.device)


def _binding(problem: Problem, choice: _Choice, launch: Callable[..., Any]) -> Binding:
    config = MappingProxyType(space.config_to_dict(choice.config))
    return Binding(problem, choice.origin, choice.layer, choice.spec.name, config, choice.median_us, launch)

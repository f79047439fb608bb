"""Finds the kernel that serves one problem: tuned, else by the miss policy, else the vendor library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from dmuon_tune import space
from dmuon_tune.backends import CompiledKernel, backends, makes_portable
from dmuon_tune.cache import Artefact, ArtefactError, ArtefactStore, CacheEntry, Layers, TuningKey
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import NoLegalConfigError, UsageError
from dmuon_tune.kernel_specs import kernel, kernels, ops
from dmuon_tune.measure import untuned
from dmuon_tune.measure.build import compiled_kernel, is_of_todays_code, load_artefact, tuning_key
from dmuon_tune.measure.winners import kept_winner, library_kernel
from dmuon_tune.problem import Problem, distance, same_code
from dmuon_tune.recipe import Pick
from dmuon_tune.spec import KernelSpec

from .revalidation import Revalidation


@dataclass(frozen=True)
class Binding:
    """A problem and its callable; ``origin`` is tuned, nearest, heuristic or library, ``layer`` the cache's label.

    ``from_artefact`` where its code was compiled before, by ``dmuon-tune cache build``, and is only loaded here.
    ``key`` is the SHA-256 of the tuning key under which an artefact of it is kept, where known; ``is_kept``: a cache
    says that this configuration is right for this problem.
    """

    problem: Problem
    origin: str
    layer: str
    kernel: str
    config: Mapping[str, Any]
    median_us: float | None
    launch: Callable[..., Any]
    from_artefact: bool = False
    key: str = ""
    is_kept: bool = False


@dataclass(frozen=True)
class _Choice:
    """``key``: the tuning key's SHA-256 under which an artefact of it is kept; ``is_kept``: a cache says that this
    configuration is right for this problem."""

    origin: str
    spec: KernelSpec
    config: Any
    layer: str = ""
    median_us: float | None = None
    key: str = ""
    is_kept: bool = False


class KernelFailure(Exception):
    """Why a kernel cannot run here, in one line."""


class Resolver:
    """Binds problems on one device, each once; collects what was ``missing`` and which tuned kernels failed.

    Where the caches hold a kernel's compiled code, that is loaded, and its DSL need not be here. ``build`` makes the
    callable of what they do not hold, as :func:`dmuon_tune.measure.build.compiled_kernel` does; a ``build`` that is
    another one is called for all, and nothing is loaded or checked. Else what was measured elsewhere is checked once
    before it serves.
    """

    def __init__(
        self,
        device: DeviceFingerprint,
        layers: Layers,
        use_nearest: bool,
        build: Callable[..., CompiledKernel] = compiled_kernel,
    ) -> None:
        self._build, self._loads = build, build is compiled_kernel
        self._unusable: set[str] = set()  # ids of artefacts that are damaged or do not run here
        self._revalidation = Revalidation(layers, device) if self._loads else None
        self.device = device
        self.layers = layers
        self.bound: dict[Problem, Binding] = {}
        self._compiled_of: dict[tuple[Problem, str, str], Binding] = {}
        self._choices: dict[Problem, _Choice] = {}
        self._current_of: dict[Problem, tuple[str, list[CacheEntry]]] = {}
        self._first_keys: dict[str, TuningKey] = {}  # by the kernel: of another problem in all but that the same
        self._unavailable: dict[str, bool] = {}
        self.missing: list[Problem] = []
        self.failures: list[str] = []
        self._use_nearest = use_nearest
        self._every_entry: list[tuple[str, CacheEntry]] | None = None

    def bind(self, problem: Problem, pick: Pick | None = None, layer: str = "") -> Binding:
        """The problem's callable; NoLegalConfigError where not even the library serves it.

        ``pick`` is the kernel that a recipe of ``layer`` (or of none) chose for it, taken while its code is today's.
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

    def release(self) -> None:
        """Give back the memory that checks took, once all is bound."""
        if self._revalidation is not None:
            self._revalidation.release()

    def library(self, problem: Problem) -> Binding:
        """The vendor library's callable; NoLegalConfigError where it does not serve the problem."""
        return self._compiled(problem, self._library(problem))

    def rebound(self, decided: Binding) -> Binding:
        """What another process has bound, with a callable of this one; KernelFailure where it has none."""
        choice = _chosen_elsewhere(decided)
        made = self._made(decided.problem, choice)
        if made is None:
            raise KernelFailure(
                f"{decided.kernel} does not run for {decided.problem.label()}: {choice.spec.backend} is not installed"
            )
        return made

    def rebound_when_needed(self, decided: Binding) -> Binding:
        """The same at its first launch; the library's where it fails then."""
        return self._when_needed(decided.problem, _chosen_elsewhere(decided))

    def flops(self, problem: Problem) -> int:
        """FLOPs of a product by the kernel that would serve it: the library computes a symmetric one in full."""
        return untuned.flops(problem, self._choice(problem).spec)

    def untuned_fused(self, problem: Problem) -> bool:
        """Whether a recurrence, or a span of it, has an untuned kernel in one launch here."""
        return self._fused(problem) is not None

    def _choice(self, problem: Problem) -> _Choice:
        """What serves a problem: its tuned kernel, else by the miss policy."""
        if problem not in self._choices:
            self._choices[problem] = self._chosen(problem)
        return self._choices[problem]

    def _chosen(self, problem: Problem) -> _Choice:
        tuned = self._tuned(problem)
        if tuned is not None:
            return tuned
        nearest = self._nearest(problem) if self._use_nearest else None
        return nearest or self._fused(problem) or self._untuned(problem)

    def _when_needed(self, problem: Problem, choice: _Choice) -> Binding:
        """Compiled now; a whole recurrence at its first launch, for a chain's ends have mostly one in other dtypes."""
        if problem.op != "polar_small" or self._artefact(problem, choice) is not None:
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
            made = self._made(problem, choice)
        except KernelFailure as failure:
            self.failures.append(f"{failure}; the library runs instead")
            return self.library(problem)
        return made or self._compiled(problem, self._choice(problem))

    def _made(self, problem: Problem, choice: _Choice) -> Binding | None:
        """Loaded or compiled, and checked; None where it could only be loaded and is not; KernelFailure where it does
        not compile or is wrong. What the library raises is raised as it is."""
        artefact, loaded = self._loaded(problem, choice)
        if loaded is None and self._loads and not self._compiles(choice.spec):
            return None
        try:
            made = loaded or self._build(choice.spec, problem, choice.config, self.device)
        except Exception as error:  # a DSL may raise anything; training goes on with the library and says so
            if choice.origin == "library":
                raise
            first = (str(error).strip() or repr(error)).splitlines()[0]
            raise KernelFailure(f"{choice.spec.name} failed to compile for {problem.label()}: {first}") from error
        wrong = self._check_failure(problem, choice, made.launch, artefact)
        if wrong is not None:
            layer = f" of layer {choice.layer}" if choice.layer else ""
            raise KernelFailure(f"{choice.spec.name}{layer} failed its check for {problem.label()}: {wrong}")
        return _binding(problem, choice, made.launch, from_artefact=artefact is not None)

    def _check_failure(
        self, problem: Problem, choice: _Choice, launch: Callable[..., Any], artefact: Artefact | None
    ) -> str | None:
        if self._revalidation is None:
            return None
        if artefact is not None:
            return self._revalidation.failure(problem, artefact.key.sha256, artefact.config, launch, artefact.code)
        if not choice.is_kept:
            return None
        return self._revalidation.failure(problem, choice.key, space.config_to_dict(choice.config), launch)

    def _loaded(self, problem: Problem, choice: _Choice) -> tuple[Artefact | None, CompiledKernel | None]:
        """The caches' compiled code and its callable; None where there is none or it does not run, which is said."""
        found = self._artefact(problem, choice) if self._loads else None
        if found is None:
            return None, None
        store, artefact = found
        try:
            return artefact, load_artefact(store, artefact)
        except ArtefactError as error:
            self._unusable.add(artefact.id)
            self._current_of.pop(problem, None), self._choices.pop(problem, None)  # they count on it
            instead = "it is compiled now" if self._compiles(choice.spec) else "another kernel runs instead"
            self.failures.append(f"{instead}: {error}")
            return None, None

    def _artefact(self, problem: Problem, choice: _Choice) -> tuple[ArtefactStore, Artefact] | None:
        """The compiled code of a choice, where the caches hold it."""
        if not makes_portable(choice.spec.backend):
            return None
        key = choice.key or self._key(choice.spec, problem, choice.config)
        return self._find(key, space.config_to_dict(choice.config)) if key else None

    def _find(self, key: str, config: Mapping[str, Any]) -> tuple[ArtefactStore, Artefact] | None:
        try:
            found = self.layers.artefact(key, config)
        except ArtefactError as error:
            if str(error) not in self.failures:
                self.failures.append(str(error))
            return None
        return None if found is None or found[1].id in self._unusable else found

    def _key(self, spec: KernelSpec, problem: Problem, config: Any) -> str | None:
        """Under which key a configuration runs here, compiled or loaded; None where it does not."""
        if not spec.is_legal(problem, config, self.device):
            return None
        if self._compiles(spec):
            return self._today(spec, problem)
        wanted = space.config_to_dict(config)
        for artefact in self.layers.artefacts(problem, self.device):
            if artefact.config == wanted and is_of_todays_code(artefact.key, spec):
                return artefact.key.sha256 if artefact.id not in self._unusable else None
        return None

    def _is_shipped(self, spec: KernelSpec, key: str, config: Mapping[str, Any]) -> bool:
        """Whether the caches hold compiled code of a kept result, made of today's source by whatever toolchain."""
        if not makes_portable(spec.backend):
            return False
        found = self._find(key, config)
        return found is not None and is_of_todays_code(found[1].key, spec)

    def _picked(self, pick: Pick, layer: str) -> _Choice | None:
        spec = next((spec for spec in kernels(pick.problem.op) if spec.name == pick.kernel), None)
        if spec is None or not spec.serves(pick.problem, self.device):
            return None
        today = self._today(spec, pick.problem) if self._compiles(spec) else ""
        if today != pick.key and not self._is_shipped(spec, pick.key, pick.config):
            return None
        where, entries = self._current(pick.problem)
        if entries and layer and self.layers.is_above(where, layer):
            return None  # a layer's kernel goes before the recipe of one below it
        config = space.config_from_dict(spec.Config, pick.config)
        of_pick = (entry for entry in entries if (entry.key.sha256, entry.config) == (pick.key, pick.config))
        median_us = next((entry.measurement.median_us for entry in of_pick), None)
        return _Choice("tuned", spec, config, layer, median_us, pick.key, is_kept=True)

    def _as(self, problem: Problem, like: Binding | None) -> _Choice | None:
        if like is None:
            return None
        spec = next(spec for spec in kernels(like.problem.op) if spec.name == like.kernel)
        config = space.config_from_dict(spec.Config, dict(like.config))
        key = self._key(spec, problem, config)
        return _Choice(like.origin, spec, config, like.layer, key=key) if key else None

    def _fused(self, problem: Problem) -> _Choice | None:
        return self._first_untuned(untuned.fused(problem, kernels(problem.op)), problem)

    def _first_untuned(self, specs: Iterable[KernelSpec], problem: Problem) -> _Choice | None:
        choices = (self._as_untuned(spec, problem) for spec in specs)
        return next((choice for choice in choices if choice is not None), None)

    def _as_untuned(self, spec: KernelSpec, problem: Problem) -> _Choice | None:
        """A kernel as it runs without tuning, where it runs here."""
        config = spec.untuned(problem, self.device)
        key = None if config is None else self._key(spec, problem, config)
        return _Choice("heuristic", spec, config, key=key) if key else None

    def _tuned(self, problem: Problem) -> _Choice | None:
        """The winner among the first layer's current entries."""
        label, entries = self._current(problem)
        best = kept_winner(entries, {spec.name: spec for spec in kernels(problem.op)}, self.device)
        if best is None:
            return None
        spec = kernel(best.key.kernel)
        config = space.config_from_dict(spec.Config, best.config)
        return _Choice("tuned", spec, config, label, best.measurement.median_us, best.key.sha256, is_kept=True)

    def _current(self, problem: Problem) -> tuple[str, list[CacheEntry]]:
        """(Label, entries) of the first layer with some of today's kernels and toolchains, or that come compiled."""
        if problem not in self._current_of:
            specs = {spec.name: spec for spec in kernels(problem.op) if spec.serves(problem, self.device)}
            keys = {name: self._today(spec, problem) for name, spec in specs.items() if self._compiles(spec)}
            by_layer = self.layers.entries_by_layer(problem, self.device)

            def is_current(entry: CacheEntry) -> bool:
                spec, key = specs.get(entry.key.kernel), entry.key.sha256
                todays = spec is not None and (keys.get(spec.name) == key or self._is_shipped(spec, key, entry.config))
                return todays and entry.measurement.ok

            current = ((label, [entry for entry in entries if is_current(entry)]) for label, entries in by_layer)
            self._current_of[problem] = next((found for found in current if found[1]), ("", []))
        return self._current_of[problem]

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
            if spec is None:
                continue
            try:
                config = space.config_from_dict(spec.Config, entry.config)
            except ValueError:  # an entry of another version of this kernel
                continue
            if key := self._key(spec, problem, config):
                return _Choice("nearest", spec, config, label, key=key)
        return None

    def _untuned(self, problem: Problem) -> _Choice:
        """Without a measurement the library is the safe choice, but for large symmetric products on a GPU."""
        specs = untuned.symmetric(problem, kernels(problem.op), self.device)
        return self._first_untuned(specs, problem) or self._library(problem)

    def _library(self, problem: Problem) -> _Choice:
        for spec in kernels(problem.op):
            config = spec.untuned(problem, self.device) if spec.name == library_kernel(problem.op) else None
            if config is not None:
                return _Choice("library", spec, config)
        raise NoLegalConfigError(f"no kernel runs {problem.label()} on {self.device.name}; see 'dmuon-tune doctor'")

    def _compiles(self, spec: KernelSpec) -> bool:
        """Whether this kernel's DSL and its compilers are here."""
        if spec.backend not in self._unavailable:
            backend = backends().get(spec.backend)
            self._unavailable[spec.backend] = backend is None or backend.unavailable(self.device) is not None
        return not self._unavailable[spec.backend]

    def _today(self, spec: KernelSpec, problem: Problem) -> str:
        """SHA-256 of the tuning key of a kernel that compiles here."""
        known = self._first_keys.get(spec.name)
        if known is None:
            known = self._first_keys[spec.name] = tuning_key(spec, problem, self.device)
        return replace(known, problem=problem).sha256


def _chosen_elsewhere(decided: Binding) -> _Choice:
    try:
        spec = kernel(decided.kernel)
        config = space.config_from_dict(spec.Config, dict(decided.config))
    except (UsageError, ValueError) as error:
        raise KernelFailure(f"{decided.kernel} does not run for {decided.problem.label()}: {error}") from error
    return _Choice(decided.origin, spec, config, decided.layer, decided.median_us, decided.key, decided.is_kept)


def _binding(
    problem: Problem, choice: _Choice, launch: Callable[..., Any], from_artefact: bool = False
) -> Binding:
    config = MappingProxyType(space.config_to_dict(choice.config))
    return Binding(
        problem, choice.origin, choice.layer, choice.spec.name, config, choice.median_us, launch, from_artefact,
        choice.key, choice.is_kept,
    )

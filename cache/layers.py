"""Layers: the caches that training reads, files and servers, first hit wins, none written or able to stop a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from logging import getLogger
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from dmuon_tune import starter
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import CacheError, UsageError
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe

from .artefacts import Artefact, ArtefactError, ArtefactStore
from .checked import Checked
from .database import busy_timeout_s, describe, locate
from .paths import listed_caches, site_cache_paths, user_cache_path
from .results import CacheEntry
from .store import Store

ENTRY_POINT_GROUP = "dmuon_tune.caches"
STARTERS = (EntryPoint("starter-h200", "dmuon_tune.starter:h200", ENTRY_POINT_GROUP),)  # as in pyproject.toml
PATH_LABEL, USER_LABEL, SITE_LABEL, PACKAGE_LABEL = "path", "user", "site", "package"

Answer = TypeVar("Answer")

logger = getLogger("dmuon_tune.cache")


@dataclass
class _Layer:
    """One read-only cache, a file or a server's URL, opened at its first use; after a failure it counts as empty.

    ``device`` is the one that all of it is for (None: any), so that asking for another one opens nothing.
    """

    label: str
    path: Path | str
    must_exist: bool
    device: DeviceFingerprint | None = None
    failure: str = ""
    _store: Store | None = None

    def read(
        self, ask: Callable[[Store], Answer], otherwise: Answer, device: DeviceFingerprint | None = None
    ) -> Answer:
        """What the layer's store answers about ``device`` (None: about all); ``otherwise`` where there is no store, it
        is for another device or cannot be read."""
        if self.failure or (self.device is not None and device not in (None, self.device)):
            return otherwise
        if not (self.must_exist or os.path.exists(self.path)):
            return otherwise
        try:
            if self._store is None:
                self._store = Store.open(self.path, read_only=True, shipped=self.label != USER_LABEL)
            return ask(self._store)
        except (CacheError, UsageError, OSError) as error:
            self.failure = str(error)
            self.close()
            _warn_once(f"cache layer {self.label} is left out: {self.failure}")
            return otherwise

    @property
    def where(self) -> str:
        """The path, or the URL without its password."""
        if isinstance(self.path, Path):
            return str(self.path)
        try:
            return describe(locate(self.path))
        except UsageError:
            return "an unusable URL"

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


class Layers:
    """Every cache of this machine in the order of precedence: ``DMUON_TUNE_CACHE_PATH`` (label ``path``), the user's
    (``user``), the site's (``site``), and those of installed packages (``package <name>``), this one's own last; they
    name a path by an entry point ``dmuon_tune.caches``: a function without arguments that returns one, or one and the
    device model that it is for.

    A layer that cannot be read is left out with one warning line; one that does not exist is no failure, unless it
    was named by the environment or by a package.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    @classmethod
    def open(cls, environ: Mapping[str, str] = os.environ) -> Layers:
        """Nothing is opened, and no package asked, before the first look-up. UsageError where the busy timeout is none.
        """
        busy_timeout_s()
        return cls(dict(environ))

    @property
    def _layers(self) -> Iterator[_Layer]:
        """Every layer; no package is asked for one by who stops at those of this machine."""
        yield from self._of_this_machine
        yield from self._of_packages

    @cached_property
    def _of_this_machine(self) -> list[_Layer]:
        user = user_cache_path(self._environ)
        found = [
            _Layer(USER_LABEL if path == user else PATH_LABEL, path, True)
            for path in listed_caches(self._environ)
        ]
        found.append(_Layer(USER_LABEL, user, False))
        found += [_Layer(SITE_LABEL, path, False) for path in site_cache_paths(self._environ)]
        return _each_once(found, ())

    @cached_property
    def _of_packages(self) -> list[_Layer]:
        return _each_once(_package_layers(self._environ), self._of_this_machine)

    def entries(
        self, problem: Problem | None, device: DeviceFingerprint | None
    ) -> list[tuple[str, CacheEntry]]:
        """(Layer label, entry) of every key's best entry (None: for all problems, devices): layers in order of
        precedence, within a layer the fastest first."""
        return [(label, entry) for label, found in self.entries_by_layer(problem, device) for entry in found]

    def entries_by_layer(
        self, problem: Problem | None, device: DeviceFingerprint | None
    ) -> Iterator[tuple[str, list[CacheEntry]]]:
        """The same, (layer label, its entries): a layer is read when it is asked for, so that who stops at a hit opens
        none below it."""
        for layer in self._layers:
            nothing: list[CacheEntry] = []
            yield layer.label, layer.read(lambda store: store.entries(problem, device), nothing, device)

    def is_above(self, label: str, other: str) -> bool:
        """Whether the first layer of one label goes before that of another one."""
        return label != other and next(each.label for each in self._layers if each.label in (label, other)) == label

    def recipe(self, device: DeviceFingerprint, group: Group, dtype: str) -> tuple[str, Recipe] | None:
        """(Layer label, recipe) of the first layer that has one for the group in this dtype on this device model."""
        for layer in self._layers:
            found = layer.read(lambda store: store.recipe(device, group, dtype), None, device)
            if found is not None:
                return layer.label, found
        return None

    def recipes(self, device: DeviceFingerprint) -> list[tuple[str, Recipe]]:
        """(Layer label, recipe) of every recipe on this device model: layers in order of precedence, whether or not one
        above has a recipe for the same group."""
        found: list[tuple[str, Recipe]] = []
        for layer in self._layers:
            nothing: list[Recipe] = []
            recipes = layer.read(lambda store: store.recipes(device), nothing, device)
            found += [(layer.label, recipe) for recipe in recipes]
        return found

    @cached_property
    def _artefact_stores(self) -> list[ArtefactStore]:
        stores: dict[Path, ArtefactStore] = {}
        for layer in self._layers:
            try:
                store = ArtefactStore.beside(layer.path)
            except UsageError:  # a malformed URL, of which reading the layer warns
                continue
            stores.setdefault(store.folder, store)
        return list(stores.values())

    def artefact(self, key_sha256: str, config: Mapping[str, Any]) -> tuple[ArtefactStore, Artefact] | None:
        """A configuration's compiled code and where it lies, from the first layer that has it; ArtefactError where that
        record is damaged and no other layer has one."""
        damaged: ArtefactError | None = None
        for store in self._artefact_stores:
            try:
                found = store.find(key_sha256, config)
            except ArtefactError as error:
                damaged = damaged or error
                continue
            if found is not None:
                return store, found
        if damaged is not None:
            raise damaged
        return None

    def artefacts(self, problem: Problem, device: DeviceFingerprint) -> list[Artefact]:
        """Every artefact of a problem on a device model, of any kernel, configuration and toolchain."""
        return self._artefacts_by_problem.get((problem, device), [])

    @cached_property
    def _artefacts_by_problem(self) -> dict[tuple[Problem, DeviceFingerprint], list[Artefact]]:
        found: dict[tuple[Problem, DeviceFingerprint], list[Artefact]] = {}
        for store in self._artefact_stores:
            try:
                every = store.all()
            except ArtefactError as error:
                _warn_once(str(error))
                continue
            for artefact in every:
                found.setdefault((artefact.key.problem, artefact.key.device), []).append(artefact)
        return found

    @cached_property
    def checked(self) -> Checked:
        """Which entries of elsewhere passed a check here."""
        return Checked(self._environ)

    def was_measured_here(self, key_sha256: str, config: Mapping[str, Any]) -> bool:
        """Whether the user's cache holds an ok result of this configuration that did not come with a bundle."""
        users = (layer for layer in self._layers if layer.label == USER_LABEL)
        return any(layer.read(lambda store: store.was_measured_here(key_sha256, config), False) for layer in users)

    def descriptions(self) -> list[LayerDescription]:
        """Each layer's ``label``, ``path`` (a URL without its password), ``state`` (ok, absent, unreadable),
        ``entries`` (their count) and ``detail`` (why it is unreadable)."""
        return [_description(layer) for layer in self._layers]

    def close(self) -> None:
        for opened in ("_of_this_machine", "_of_packages"):
            for layer in self.__dict__.get(opened, []):
                layer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class LayerDescription(dict[str, Any]):
    """What may be shown of a layer; ``location`` opens it and may hold a password."""

    def __init__(self, location: Path | str, **shown: Any) -> None:
        super().__init__(**shown)
        self.location = location


def _description(layer: _Layer) -> LayerDescription:
    count = layer.read(lambda store: len(store.entries()), -1)
    return LayerDescription(
        layer.path,
        label=layer.label,
        path=layer.where,
        state="unreadable" if layer.failure else "absent" if count < 0 else "ok",
        entries=max(0, count),
        detail=layer.failure,
    )


def _each_once(layers: Iterable[_Layer], above: Iterable[_Layer]) -> list[_Layer]:
    """The first layer of each path that none of those above has."""
    by_path: dict[Path | str, _Layer] = {}
    for layer in layers:
        by_path.setdefault(layer.path, layer)
    taken = {layer.path for layer in above}
    return [layer for path, layer in by_path.items() if path not in taken]


def packaged_cache(name: str) -> Path | None:
    """The cache that an installed package ships under this name of an entry point; None where there is none.

    Raises whatever the package's code does.
    """
    for point in _entry_points({}):
        if point.name == name:
            return _shipped(point)[0]
    return None


def _package_layers(environ: Mapping[str, str]) -> list[_Layer]:
    found = []
    for point in _entry_points(environ):
        try:
            path, device = _shipped(point)
            found.append(_Layer(f"{PACKAGE_LABEL} {point.name}", path, True, device))
        except Exception as error:  # a package's own code: whatever it raises must not stop a training job
            _warn_once(f"cache layer {PACKAGE_LABEL} {point.name} ({point.value}) is left out: {error!r}")
    return found


def _entry_points(environ: Mapping[str, str]) -> list[EntryPoint]:
    """What installed packages name, by name; this package's own last, which a bare checkout has without metadata."""
    ours = {point.value: point for point in STARTERS}
    others = {point.value: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.value not in ours}
    points = sorted(others.values(), key=lambda point: point.name)
    return points if environ.get(starter.VARIABLE) == "0" else [*points, *ours.values()]


def _shipped(point: EntryPoint) -> tuple[Path, DeviceFingerprint | None]:
    """Where its cache lies, and for which device alone all of it is."""
    named = point.load()()
    path, device = named if isinstance(named, tuple) else (named, None)
    return Path(path).absolute(), device

"""Says of kept entries which wins its problem and why one is stale: other code, toolchain or device than today's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from dmuon_tune.backends import backends
from dmuon_tune.cache import CacheEntry, TuningKey
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.problem import Problem

from .verify import VALIDATION
from .winners import kept_winner

StaleOf = Callable[[TuningKey], str | None]


@dataclass(frozen=True)
class Winner:
    """A problem's winner in one layer, the library's microseconds there, and why it is stale (None: it serves)."""

    layer: str
    entry: CacheEntry
    library_us: float | None
    stale: str | None


def winners(entries: Iterable[tuple[str, CacheEntry]], stale_of: StaleOf | None = None) -> list[Winner]:
    """Of (layer label, entry): each layer's, device's and problem's winner, in problem order; entries of today's code
    go before stale ones. ``stale_of`` answers as :func:`staleness` does."""
    by_problem: dict[tuple[str, str, Problem], list[CacheEntry]] = {}
    for label, entry in entries:
        by_problem.setdefault((label, f"{entry.key.device.limits()}", entry.key.problem), []).append(entry)
    asked = stale_of or once_each()
    return [
        _winner(label, candidates, asked)
        for (label, _, _), candidates in sorted(by_problem.items(), key=lambda item: (item[0][2], item[0][:2]))
    ]


def _winner(layer: str, candidates: list[CacheEntry], stale_of: StaleOf) -> Winner:
    specs = {spec.name: spec for spec in kernels()}
    current = [entry for entry in candidates if stale_of(entry.key) is None]
    best = kept_winner(current, specs, current[0].key.device) if current else None
    best = best or min(candidates, key=lambda entry: entry.measurement.median_us or 0.0)
    library = [entry for entry in current or candidates if entry.key.toolchain.backend == "library"]
    library_us = min((entry.measurement.median_us or 0.0 for entry in library), default=None)
    return Winner(layer, best, library_us, stale_of(best.key))


def once_each() -> StaleOf:
    """:func:`staleness` that reads each kernel's sources once for all its keys of one code, device and toolchain."""
    known: dict[Hashable, str | None] = {}

    def stale_of(key: TuningKey) -> str | None:
        asked = (key.problem.op, key.kernel, key.spec_digest, key.device, key.toolchain, key.validation)
        if asked not in known:
            known[asked] = staleness(key)
        return known[asked]

    return stale_of


def staleness(key: TuningKey, device: DeviceFingerprint | None = None) -> str | None:
    """The field in which a key differs from today's, on ``device`` (None: the key's own); None if none."""
    here = device or key.device
    spec = next((spec for spec in kernels(key.problem.op) if spec.name == key.kernel), None)
    if spec is None or spec.backend not in backends():
        return f"kernel: there is no {key.kernel} any more"
    if here != key.device:
        return "other device: " + _differences(key.device.limits(), here.limits())
    try:
        toolchain = backends()[spec.backend].toolchain(here)
    except ModuleNotFoundError:
        return f"toolchain not installed here: {key.toolchain.label()}"
    if toolchain != key.toolchain:
        return "other toolchain: " + _differences(dict(key.toolchain.versions), dict(toolchain.versions))
    digest = spec.digest()
    if digest != key.spec_digest:
        return f"other digest: code {key.spec_digest[:8]}, now {digest[:8]}"
    if key.validation != VALIDATION:
        return f"other validation: {key.validation or 'unknown'}, here {VALIDATION}"
    return None


def _differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {then.get(name)}, here {now.get(name)}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    )

"""Picks a problem's winner among everything measured under the current code, device and toolchains."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dmuon_tune.backends import is_peer
from dmuon_tune.cache import CacheEntry
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measurement import race_winner
from dmuon_tune.space import config_to_dict
from dmuon_tune.spec import KernelSpec

TIE = 1.02  # medians this close are a tie: run-to-run differences of one kernel are about as large


@dataclass(frozen=True)
class Contender:
    """An ok entry; ``is_untuned`` where its configuration is what its kernel runs without tuning."""

    entry: CacheEntry
    is_untuned: bool

    @property
    def median_us(self) -> float:
        return self.entry.measurement.median_us or math.inf

    @property
    def is_peer(self) -> bool:
        """Whether its kernel is another project's."""
        return is_peer(self.entry.key.toolchain.backend)

    @property
    def is_library(self) -> bool:
        return self.entry.key.kernel == library_kernel(self.entry.key.problem.op)


def library_kernel(op: str) -> str:
    """Name of an op's vendor library kernel."""
    return f"{op}.library"


def contenders(
    entries: Iterable[CacheEntry], specs: Mapping[str, KernelSpec], device: DeviceFingerprint
) -> list[Contender]:
    """Kept entries as contenders; ``specs`` holds their kernels by name."""
    found = []
    for entry in entries:
        untuned = specs[entry.key.kernel].untuned(entry.key.problem, device)
        found.append(Contender(entry, untuned is not None and entry.config == config_to_dict(untuned)))
    return found


def winner(among: Iterable[Contender]) -> CacheEntry | None:
    """What a race of finalists decided for; without one the smallest median, where a tie goes to the preferred. None
    without contenders."""
    entrants = list(among)
    leading = [entrants[place] for place in _leaders([contender.entry for contender in entrants])]
    return min(leading, key=preference).entry if leading else None


def kept_winner(
    entries: Sequence[CacheEntry], specs: Mapping[str, KernelSpec], device: DeviceFingerprint
) -> CacheEntry | None:
    """:func:`winner` of kept entries; what is untuned, which a search may have to say, is asked of those that tie."""
    leading = [entries[place] for place in _leaders(entries)]
    return leading[0] if len(leading) == 1 else winner(contenders(leading, specs, device))


def _leaders(entries: Sequence[CacheEntry]) -> list[int]:
    """The places of those among which the preference decides: the race's winner, else what ties with the fastest."""
    raced = race_winner([entry.measurement for entry in entries])
    if raced is not None or not entries:
        return [] if raced is None else [raced]
    medians_us = [entry.measurement.median_us or math.inf for entry in entries]
    return [place for place, median_us in enumerate(medians_us) if median_us <= TIE * min(medians_us)]


def preference(contender: Contender) -> tuple[bool, bool, bool, float, str, str]:
    """The order among ties: the library, this project's kernels, an untuned configuration, less shared memory, the
    lexically first kernel and configuration."""
    entry = contender.entry
    smem_bytes = float(entry.measurement.resources.get("smem_bytes", math.inf))
    config = json.dumps(entry.config, sort_keys=True)
    return (
        not contender.is_library, contender.is_peer, not contender.is_untuned, smem_bytes, entry.key.kernel, config,
    )

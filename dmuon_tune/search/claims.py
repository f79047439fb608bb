"""Divides a run's work among the runs that share its cache: takes a share, gives back what exceeds it, waits."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from logging import getLogger
from typing import Generic, TypeVar

from dmuon_tune.cache import Claims, Store
from dmuon_tune.cache.claims import Rivals
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import CacheError

LOOK_EVERY_S = 1.0  # at the other runs
BEATS_A_LEASE = 4  # heartbeats in the time that a claim lasts

Work = TypeVar("Work", bound=Hashable)

logger = getLogger(__name__)


def digest(*parts: object) -> str:
    """A unit's name: the SHA-256 of JSON types, equal for equal parts on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Membership:
    """This run among those that share its cache and device model; alone where no other process can see the cache.

    From its first claim on, a thread renews what it holds. Claims that were lost meanwhile, as after the machine slept,
    are held no more. Close it to let others have everything at once; else claims expire.
    """

    def __init__(self, store: Store, device: DeviceFingerprint) -> None:
        self._claims = None if store.is_private else Claims(store, digest(device.limits()))
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._heart: threading.Thread | None = None
        self._rivals, self._next_look = Rivals(0, {}), 0.0

    @property
    def is_alone(self) -> bool:
        return self._claims is None

    def join(self) -> None:
        """Let the other runs know of this one, though it holds nothing yet."""
        if self._heart is None:
            self.take([])

    def take(self, wanted: Sequence[Sequence[str]]) -> list[bool]:
        """For each set of units whether it is this run's now."""
        if self._claims is None:
            return [True] * len(wanted)
        with self._lock:
            taken = self._claims.take(wanted)
            self._held.update(unit for units, got in zip(wanted, taken, strict=True) if got for unit in units)
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, args=(self._claims,), name="claims", daemon=True)
            self._heart.start()
        return taken

    def release(self, units: Collection[str]) -> None:
        if self._claims is not None and units:
            with self._lock:
                self._held.difference_update(units)
                self._claims.release(units)

    def holds(self, units: Collection[str]) -> bool:
        return self._claims is None or self._held.issuperset(units)

    def rivals(self) -> Rivals:
        """The other runs, as of a moment ago."""
        if self._claims is not None and time.monotonic() >= self._next_look:
            self._rivals = self._claims.rivals()
            self._next_look = time.monotonic() + LOOK_EVERY_S
        return self._rivals

    def close(self) -> None:
        self._is_over.set()
        if self._heart is None or self._claims is None:
            return
        self._heart.join()
        self._heart = None
        try:
            self._claims.leave()
        except CacheError as error:  # what is measured is kept, and claims end by themselves
            logger.debug("claims are left to expire: %s", error)

    def _beat(self, claims: Claims) -> None:
        while not self._is_over.wait(claims.lease_s / BEATS_A_LEASE):
            try:
                with self._lock:
                    self._held &= claims.renew()
            except CacheError as error:  # the next beat may succeed; the run itself says what it cannot keep
                logger.debug("a heartbeat failed: %s", error)


class Share(Generic[Work]):
    """What of a list of work is this run's; ``open`` is what it neither holds nor has finished, most urgent first.

    Runs divide evenly: each holds at most the open work, its own and the others', over the number of runs. So whoever
    comes later gets a part of what the first one holds, and whoever is done a part of what is left.
    """

    def __init__(self, membership: Membership, units: Mapping[Work, Sequence[str]]) -> None:
        self._membership, self._units = membership, units
        self.open = list(units)

    def take(self) -> list[Work]:
        """This run's share of the open work that nobody else holds."""
        self._membership.join()
        rivals = self._membership.rivals()
        free = [work for work in self.open if rivals.held.keys().isdisjoint(self._units[work])]
        asked = free[: self._share(len(self.open), rivals)]
        taken = self._membership.take([self._units[work] for work in asked]) if asked else []
        mine = [work for work, got in zip(asked, taken, strict=True) if got]
        self.open = [work for work in self.open if work not in mine]
        return mine

    def surplus(self, mine: Sequence[Work], busy: Collection[Work]) -> list[Work]:
        """Of the work that this run holds, and has begun nothing new of (not in ``busy``), what others should have: the
        least urgent; and what it lost."""
        if self._membership.is_alone:
            return []
        rivals = self._membership.rivals()
        waiting = rivals.runs and len(mine) - self._share(len(mine) + len(self.open), rivals)
        idle = [work for work in mine if work not in busy]
        return list(dict.fromkeys([
            *(work for work in idle if not self._membership.holds(self._units[work])),
            *idle[::-1][: max(0, waiting)],
        ]))

    def give_back(self, works: Sequence[Work]) -> None:
        """Let others have it; what they leave is taken again."""
        self.open += works
        self.finish(works)

    def finish(self, works: Sequence[Work]) -> None:
        """This run is done with it."""
        self._membership.release([unit for work in works for unit in self._units[work]])

    def holders(self) -> tuple[str, ...]:
        """The hosts that hold open work."""
        held = self._membership.rivals().held
        return tuple(sorted({held[unit] for work in self.open for unit in self._units[work] if unit in held}))

    @staticmethod
    def _share(count: int, rivals: Rivals) -> int:
        return -(-count // (rivals.runs + 1))

"""The finals: which finalists race, what their race decides, and which disturbed timings are taken again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any

from dmuon_tune.cache import Store
from dmuon_tune.measure.job import Entrant, Outcome, RaceJob, RaceResult
from dmuon_tune.measure.winners import Contender, preference
from dmuon_tune.measurement import Measurement
from dmuon_tune.space import config_to_dict

from .problem_search import Candidate, ProblemSearch

logger = getLogger(__name__)
PLAUSIBLE = 1.15  # times the best screening median: no noise hides the fastest kernel farther back
BASELINE = 1.5  # the same for the library and the untuned configurations, which must not lose by bad luck
PREPARE_S = 120.0  # for the compilations of one race
RETIMES = 3  # disturbed timings of a problem that are taken again, beside its finalists, the fastest first


@dataclass(frozen=True)
class Race:
    """One problem's finalists, the fastest of the screening first; the library compiles at once and follows it."""

    search: ProblemSearch
    entrants: tuple[Contender, ...]
    stepwise: bool = False  # held again to find out which of them ended it


@dataclass(frozen=True)
class Retiming:
    """A configuration whose timing other processes disturbed, measured again."""

    candidate: Candidate


def finalists(search: ProblemSearch, provenance: dict[str, Any], most: int) -> tuple[Contender, ...]:
    """Those that race, ``most`` beside untuned ones, the library and the last race's winner: none where a race would
    tell nothing new."""
    known = sorted(search.contenders(provenance), key=lambda each: each.median_us)
    best_us = known[0].median_us if known else math.inf
    chosen = [each for each in known if each.median_us <= PLAUSIBLE * best_us][:most]
    library = next((each for each in known if each.is_library), None)
    for each in known:
        is_near = each.median_us <= BASELINE * best_us or _measurement(each).disturbed
        is_baseline = (each is library or each.is_untuned) and is_near
        if each not in chosen and (is_baseline or _measurement(each).place == 0):
            chosen.append(each)
    chosen.sort(key=lambda each: (each is not known[0], not each.is_library, each.median_us))
    champion = next((each for each in chosen if _measurement(each).place == 0), None)
    decided = champion is not None and not _measurement(champion).disturbed and not _has_more(search, champion)
    return () if decided or len(chosen) < 2 else tuple(chosen)


def _has_more(search: ProblemSearch, champion: Contender) -> bool:
    """Whether anything was measured since the champion's race."""
    return search.known > int(_measurement(champion).resources["race"].get("known", 0))


def _measurement(contender: Contender) -> Measurement:
    return contender.entry.measurement


def retimings(search: ProblemSearch, racing: Sequence[Contender]) -> list[Retiming]:
    """Disturbed timings that no race replaces: their configurations may be better than they look."""
    in_race = [(each.entry.key.kernel, each.entry.config) for each in racing]
    found = [
        (measurement.median_us or math.inf, Candidate(search, kernel, config))
        for kernel in search.kernels
        for config, measurement, _ in kernel.outcomes
        if measurement.ok and measurement.disturbed and measurement.place is None
        and (kernel.key.kernel, config_to_dict(config)) not in in_race
    ]
    found.sort(key=lambda pair: pair[0])
    return [Retiming(candidate) for _, candidate in found[:RETIMES]]


class Finals:
    """All problems' races, those that the model spends most time in first; each result is kept as it comes. ``races``:
    how many there are by what is known at the beginning."""

    def __init__(
        self, searches: Sequence[ProblemSearch], store: Store, provenance: dict[str, Any], most: int
    ) -> None:
        """``most``: finalists of a problem."""
        self._store, self._provenance, self._most = store, provenance, most
        self._waiting = deque(sorted(searches, key=lambda search: -search.time_us))
        self._again: deque[Race] = deque()
        self._retimings: deque[Retiming] = deque()
        self.races = 0
        for search in self._waiting:
            entrants = finalists(search, provenance, most)
            self.races += bool(entrants)
            self._retimings += retimings(search, entrants)

    def next_retiming(self) -> Retiming | None:
        """They come before the races, which they may change."""
        return self._retimings.popleft() if self._retimings else None

    def next_race(self) -> Race | None:
        """None where every problem's race is done or under way."""
        if self._again:
            return self._again.popleft()
        while self._waiting:
            search = self._waiting.popleft()
            entrants = finalists(search, self._provenance, self._most)
            if entrants:
                return Race(search, entrants)
        return None

    def keep(self, race: Race, outcome: Outcome, provenance: dict[str, Any]) -> bool:
        """Keep how a race ended; whether it decided. One that other processes disturbed does not: its times count as
        those of any disturbed timing. Where an entrant ended it, that is kept and who is left races again; where it is
        not known which one, all do, stepwise.
        """
        decides = False
        if isinstance(outcome, RaceResult):
            results = _placed(race, outcome)
            disturbed = [pair for pair in results if pair[1].ok and pair[1].disturbed]
            decides = not disturbed and any(measurement.ok for _, measurement in results)
            for contender, measurement in disturbed:
                plain = {name: value for name, value in measurement.resources.items() if name != "race"}
                entry = contender.entry
                self._store.record(entry.key, entry.config, replace(measurement, resources=plain), provenance)
            results = [pair for pair in results if pair not in disturbed]
        else:
            assert isinstance(outcome, Measurement)
            culprit = outcome.resources.get("entrant")
            if culprit is None:
                self._hold_again(race, outcome)
                return False
            results = [(race.entrants[culprit], replace(outcome, resources={}))]
        self._store.record_race(
            [(each.entry.key, each.entry.config, measurement) for each, measurement in results], provenance
        )
        race.search.refresh(self._store)
        left = () if isinstance(outcome, RaceResult) else finalists(race.search, self._provenance, self._most)
        if left:
            self._again.append(replace(race, entrants=left))
        return decides

    def _hold_again(self, race: Race, outcome: Measurement) -> None:
        if race.stepwise:
            label, log = race.search.problem.label(), outcome.log.strip().splitlines() or ["no output"]
            logger.warning(
                "the race of %s failed (%s: %s) and decides nothing; the next run holds it again",
                label, outcome.status, log[-1],
            )
        else:
            self._again.append(replace(race, stepwise=True))


def job_of(race: Race, device: str, seed: int, prepare_s: float) -> RaceJob:
    """What the measuring process is asked to do."""
    entrants = tuple(Entrant.of(each.entry) for each in race.entrants)
    return RaceJob(race.search.problem, entrants, device, seed, prepare_s, race.stepwise)


def _placed(race: Race, result: RaceResult) -> list[tuple[Contender, Measurement]]:
    """Each entrant's measurement, those that are ok with their place: ties by preference, then by time."""
    ended = [
        (contender, measurement)
        for contender, measurement in zip(race.entrants, result.measurements, strict=True)
        if measurement is not None
    ]
    ranked = sorted((pair for pair in ended if pair[1].ok), key=_rank)
    found = [pair for pair in ended if not pair[1].ok]
    for place, (contender, measurement) in enumerate(ranked):
        record = {**measurement.resources["race"], "place": place, "known": race.search.known}
        if race.search.planned == 0:
            record["trials"] = race.search.trials
        before = _measurement(contender).resources
        kept: dict[str, Any] = {name: before[name] for name in ("compile_s", "run_s") if name in before}
        resources = {**kept, **measurement.resources, "race": record}
        found.append((contender, replace(measurement, resources=resources)))
    return found


def _rank(pair: tuple[Contender, Measurement]) -> tuple[Any, ...]:
    contender, measurement = pair
    tied = measurement.resources["race"]["tied"]
    return (not tied, *(preference(contender) if tied else (measurement.median_us,)))

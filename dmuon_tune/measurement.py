"""Measurement: the outcome of building, checking and timing one configuration, whatever happened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Status = Literal["ok", "illegal", "compile_error", "launch_error", "wrong_result", "timeout", "crashed"]
STATUSES: tuple[str, ...] = get_args(Status)
CHALLENGE = 1.25  # a screening may be so far from a race: an H200 is up to 16 % faster until its power cap holds


@dataclass(frozen=True)
class Measurement:
    """Times are microseconds a call and exist only with ``ok``; failures are results and carry their log.

    ``samples`` are the timed windows' microseconds a call. ``max_rel_err`` is the largest elementwise error against
    float64, |out − ref| / (|ref| + rms(ref)). ``resources`` holds what the backend reports (registers a thread,
    shared memory in bytes, compile seconds) and what the timing found: ``contended`` where other processes disturbed
    it, ``race`` where these are times of a race of finalists.
    """

    status: str
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: tuple[float, ...] = ()
    max_rel_err: float | None = None
    resources: dict[str, Any] = field(default_factory=dict, hash=False)
    log: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}; one of {', '.join(STATUSES)}")
        times = (self.median_us, self.p20_us, self.p80_us)
        if self.status == "ok" and (None in times or not self.samples):
            raise ValueError("an ok measurement needs its times and samples")
        if self.status != "ok" and (times != (None, None, None) or self.samples):
            raise ValueError(f"a {self.status} measurement cannot carry times")

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def disturbed(self) -> bool:
        """Whether other processes disturbed its windows, so that its times are too long."""
        return bool(self.resources.get("contended"))

    @property
    def place(self) -> int | None:
        """0 for the winner of a problem's latest race, 1 for the next, and so on; None for what was not raced."""
        place: int | None = self.resources.get("race", {}).get("place")
        return place

    @property
    def reason(self) -> str | None:
        """The line of the log that names the error, else its last one; None where the log is empty."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return next(iter(named or lines[-1:]), None)

    @classmethod
    def from_samples(
        cls, samples_us: list[float], max_rel_err: float, resources: dict[str, Any], log: str = ""
    ) -> Measurement:
        """An ok measurement whose median and percentiles are those of the windows' times (nearest rank)."""
        ordered = sorted(samples_us)

        def quantile(fraction: float) -> float:
            return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

        return cls(
            "ok", quantile(0.5), quantile(0.2), quantile(0.8), tuple(samples_us), max_rel_err, resources, log
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Measurement:
        return cls(**{**fields, "samples": tuple(fields["samples"])})


def best_of(measurements: Sequence[Measurement]) -> int:
    """Which of one key's ok measurements wins: what a race decided for, else the first of the fastest."""
    raced = race_winner(measurements)
    return raced if raced is not None else min(
        range(len(measurements)), key=lambda index: measurements[index].median_us or 0.0
    )


def race_winner(measurements: Sequence[Measurement]) -> int | None:
    """Which of one problem's ok measurements a race decided for; None where none was raced, or where one that was not
    is so much faster that no race of it could end otherwise."""
    raced = [index for index, measurement in enumerate(measurements) if measurement.place is not None]
    if not raced:
        return None
    first = min(raced, key=lambda index: (measurements[index].place or 0, measurements[index].median_us or 0.0))
    limit_us = (measurements[first].median_us or 0.0) / CHALLENGE
    beaten = any(each.place is None and (each.median_us or limit_us) < limit_us for each in measurements)
    return None if beaten else first

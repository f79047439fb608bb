"""What a batch of equal matrices costs on one device: a few known batch sizes and what lies between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from dmuon_tune import checks
from dmuon_tune.errors import UsageError


@dataclass(frozen=True)
class Point:
    """A batch of ``batch`` matrices takes ``us`` microseconds; ``measured``, or estimated."""

    batch: int
    us: float
    measured: bool = True


@dataclass(frozen=True)
class Costs:
    """Microseconds by batch size of equal matrices; ``points`` ascend in batch, at least one, and never fall.

    At most ``most`` matrices run at once (None: any number); more run one batch after another, near-equal ones.
    """

    points: tuple[Point, ...]
    most: int | None = None

    @classmethod
    def of(cls, points: Iterable[Point], most: int | None = None) -> Costs:
        """From points in any order. Of two of one batch size a measured one is kept, then the lower; a point below
        that of a smaller batch is raised to it, for a batch could be filled up. UsageError without any."""
        known: dict[int, Point] = {}
        for point in sorted(points, key=lambda point: (not point.measured, point.us)):
            checks.integer("batch", point.batch)
            checks.number("us", point.us)
            known.setdefault(point.batch, point)
        if not known:
            raise UsageError("costs need the time of at least one batch size; give a point")
        ascending = [known[batch] for batch in sorted(known)]
        raised = accumulate((point.us for point in ascending), max)
        return cls(tuple(Point(p.batch, us, p.measured) for p, us in zip(ascending, raised, strict=True)), most)

    def within(self, most: int) -> Costs:
        """The same with at most ``most`` matrices at once."""
        return Costs(self.points, most if self.most is None else min(most, self.most))

    def us(self, batch: int) -> float:
        """The time of ``batch`` matrices in microseconds: linear between points, the first one's below it, in
        proportion to the batch above the last; 0 for none."""
        return sum(count * self._at_once(size) for size, count in self._pieces(batch))

    def measured(self, batch: int) -> bool:
        """Whether no estimate takes part in the time of ``batch`` matrices."""
        return all(self._is_measured(size) for size, _ in self._pieces(batch))

    def _pieces(self, batch: int) -> list[tuple[int, int]]:
        """(Size, how many) of what runs at once, as :func:`dmuon_tune.recipe.pieces` cuts it."""
        if self.most is None or batch <= self.most:
            return [(batch, 1)] if batch else []
        count = -(-batch // self.most)
        size, larger = divmod(batch, count)
        return [(size + 1, larger), (size, count - larger)] if larger else [(size, count)]

    def _at_once(self, batch: int) -> float:
        place = bisect_left(self.points, batch, key=lambda point: point.batch)
        if place == len(self.points):
            last = self.points[-1]
            return last.us * batch / last.batch
        right = self.points[place]
        if place == 0 or right.batch == batch:
            return right.us
        left = self.points[place - 1]
        return left.us + (right.us - left.us) * (batch - left.batch) / (right.batch - left.batch)

    def _is_measured(self, batch: int) -> bool:
        place = bisect_left(self.points, batch, key=lambda point: point.batch)
        if place == len(self.points):
            return False
        exact = self.points[place].batch == batch
        return self.points[place].measured and (exact or (place > 0 and self.points[place - 1].measured))

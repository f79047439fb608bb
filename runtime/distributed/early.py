"""Batches of the next step that owners begin while a backward still runs, and how they are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmuon_tune.errors import UsageError

from ..batches import Kind
from ..phases import phase
from ..updates import Rate
from .clipping import scaled
from .exchange import Traffic
from .pipeline import Moving, Pipeline, Stage
from .whole import Keeper


@dataclass(eq=False)
class Foreseen:
    """A step that is like the one before: its ``stages``, of matrices that stay, and what it reads; of a gradient once
    that is there. ``factor``: by which clipping will multiply gradients. ``missing``: by stage, the parameters whose
    gradients it waits for or has."""

    pipeline: Pipeline
    stages: Sequence[Stage]
    moving: Moving
    factor: Tensor | None = None
    missing: dict[int, list[int]] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)  # parameters whose gradients are as batches read them

    def __post_init__(self) -> None:
        self.places = {p: place for place, p in enumerate(self.moving.weights.parameters)}
        for index, stage in enumerate(self.stages):
            if stage.batch:
                matrices = self.pipeline.of(stage)
                self.missing[index] = list(dict.fromkeys(matrix.parameter for matrix in matrices))

    def forget(self) -> None:
        """Gradients that have come are void."""
        self.moving.gradients[:] = [None] * len(self.moving.gradients)
        self._taken.clear()

    def take(self, place: int) -> None:
        """Make of a mean what the parameter's gradient will be."""
        gradient = self.moving.gradients[place]
        if gradient is not None and place not in self._taken:  # as another batch may have blocks of it too
            gradient = gradient.to(self.moving.weights.local[place].dtype)
            self.moving.gradients[place] = gradient if self.factor is None else scaled(gradient, self.factor)
            self._taken.add(place)


@dataclass(eq=False)
class Begun:
    """A batch that has been run, by what was ``read`` of the options; ``before`` is what the ``held`` weights and
    momenta were, ``given`` the gradient of each of its ``parameters`` at the end of the backward, and its version."""

    stage: Stage
    parameters: list[Tensor]
    read: list[tuple[Kind, Rate, int]]
    held: list[Tensor]
    before: list[Tensor]
    given: list[tuple[Tensor | None, int]] = field(default_factory=list)


class Early:
    """What an optimizer has begun of its next step, between ``early_step`` and the step.

    A batch that begins updates weights and momenta where they lie, on a second stream. Copies of both are kept until
    the step has found that it would do just that; otherwise they are put back. Only this rank's own memory is touched,
    so ranks need not begin the same.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.is_open = False
        self._traffic, self._keepers, self._begun = traffic, list[Keeper](), list[Begun]()
        self._foreseen: Foreseen | None = None

    @contextmanager
    def opened(self, keepers: Sequence[Keeper], foreseen: Foreseen | None) -> Iterator[None]:
        """Inside it batches begin, as the means of their gradients arrive from ``keepers``; UsageError where another
        optimizer's do."""
        every = {self, *(keeper.early for keeper in keepers if keeper.early is not None)}
        if any(each.is_open for each in every - {self}):
            raise UsageError("early_step: another optimizer's is open, of the same model; use that of one of them")
        for each in every:
            each.drop()
        self.is_open, self._keepers, self._foreseen = True, list(keepers), foreseen
        for keeper in keepers:
            keeper.early = self
        try:
            yield
        except BaseException:
            self.is_open = False
            self.drop()
            raise
        self.is_open = False

    @property
    def is_waiting(self) -> bool:
        """Whether any batch may begin yet."""
        return self.is_open and self._foreseen is not None and bool(self._foreseen.missing)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """On the stream in which means are to be waited for, and batches run."""
        assert self._foreseen is not None
        with torch.no_grad(), self._foreseen.pipeline.beside.stream():
            yield

    def arrived(self, means: Mapping[Tensor, Tensor]) -> None:
        """These are the whole gradients of parameters, inside :meth:`arriving`: begin what has all of its own."""
        foreseen = self._foreseen
        assert foreseen is not None
        gradients, missing = foreseen.moving.gradients, foreseen.missing
        for p in means.keys() & foreseen.places.keys():
            gradients[foreseen.places[p]] = means[p]
        for index in [index for index, its in missing.items() if all(gradients[place] is not None for place in its)]:
            self._begin(foreseen, index, missing.pop(index))

    def _begin(self, foreseen: Foreseen, index: int, places: Sequence[int]) -> None:
        stage, moving = foreseen.stages[index], foreseen.moving
        for place in places:
            foreseen.take(place)
        with phase("early step"):
            held = [each for every in foreseen.pipeline.whole(stage, moving) for each in every]
            parameters = [moving.weights.parameters[place] for place in places]
            before = [each.clone() for each in held]
            self._begun.append(Begun(stage, parameters, _read(foreseen.pipeline, stage, moving), held, before))
            foreseen.pipeline.move(foreseen.stages, index, moving)
        self._traffic.early_runs += len(stage.batch)
        for place in places:
            if not any(place in its for its in foreseen.missing.values()):
                moving.gradients[place] = None  # a copy in the weight's dtype is not to live longer

    def has_begun(self, p: Tensor) -> bool:
        return any(p is each for begun in self._begun for each in begun.parameters)

    def delivered(self) -> None:
        """The backward has ended, and parameters have their gradients."""
        for begun in self._begun:
            begun.given = list(map(_gradient, begun.parameters))

    @contextmanager
    def clipping(self) -> Iterator[None]:
        """Inside it all gradients are multiplied by the foreseen factor."""
        same = [begun for begun in self._begun if _are_given(begun)]
        if self._foreseen is not None and self._begun:
            self._foreseen.pipeline.beside.join()  # which may yet have to read what is multiplied
        yield
        for begun in same:
            begun.given = list(map(_gradient, begun.parameters))

    def claimed(self, stages: Sequence[Stage], moving: Moving, is_steady: Callable[[], bool]) -> set[Stage]:
        """Those of a step's ``stages`` that have been run as it would; all else that has begun is undone.

        ``is_steady``: as in the step before the same matrices move, and by the same momenta.
        """
        foreseen, right = self._foreseen, list[Begun]()
        if foreseen is None or not self._begun:
            return set()
        if stages is foreseen.stages and moving.weights is foreseen.moving.weights and is_steady():
            right = [
                begun for begun in self._begun
                if begun.read == _read(foreseen.pipeline, begun.stage, moving) and _are_given(begun)
            ]
        self._undo([begun for begun in self._begun if begun not in right])
        foreseen.pipeline.beside.join()
        self._begun = []
        return {begun.stage for begun in right}

    def drop(self) -> None:
        """Undo all: the step is over, or something else has come before it."""
        self._undo(self._begun)
        self._begun = []
        if self._foreseen is not None:
            self._foreseen.forget()
        if not self.is_open:
            for keeper in self._keepers:
                keeper.early = None
            self._keepers, self._foreseen = [], None

    @torch.no_grad()
    def _undo(self, begun: Sequence[Begun]) -> None:
        foreseen = self._foreseen
        if foreseen is None or not begun:
            return
        foreseen.pipeline.beside.join()
        for each in begun:
            torch._foreach_copy_(each.held, each.before)
            foreseen.pipeline.mark(each.stage, foreseen.moving)
            self._traffic.undone_runs += len(each.stage.batch)


def _read(pipeline: Pipeline, stage: Stage, moving: Moving) -> list[tuple[Kind, Rate, int]]:
    """What a batch reads of the options; of a learning rate on a device how often that has been written to."""
    pairs = [(moving.kind(matrix, stage.gradient_dtype), moving.rate(matrix)) for matrix in pipeline.of(stage)]
    return [(kind, rate, rate.lr._version if isinstance(rate.lr, Tensor) else 0) for kind, rate in pairs]


def _gradient(p: Tensor) -> tuple[Tensor | None, int]:
    """And how often it has been written to."""
    return p.grad, -1 if p.grad is None else p.grad._version


def _are_given(begun: Begun) -> bool:
    """Whether the gradients are those that its own were, since which nobody has written to them."""
    now = list(map(_gradient, begun.parameters))
    return len(begun.given) == len(now) and all(
        gradient is before and version == then
        for (gradient, version), (before, then) in zip(now, begun.given, strict=True)
    )

"""Rounds as they run: gradients of later rounds and updates of earlier ones travel while one is orthogonalized."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..batches import Kind, Setting
from ..execution import Momentum
from ..newton_schulz import GramNewtonSchulz
from ..phases import phase
from ..updates import Rate, move, move_alike
from .beside import Beside, Mark
from .exchange import Exchange, Parcel, Posted, Room, Traffic, Transfer, copy
from .held import Lot, Weights
from .pieces import Matrix, cut
from .rounds import DEPTH, Round
from .whole import whole_of

SLOTS = 2 * DEPTH  # of an exchange: for gradients, then for updates
Local = Mapping[int, Tensor] | Sequence[Tensor | None]  # by parameter, what lies as its local tensor


@dataclass(frozen=True, eq=False)
class Stage:
    """One round and this rank's part of it: its ``batch``, and what it sends and receives."""

    round: Round
    batch: tuple[int, ...]
    inward: Transfer
    outward: Transfer

    @property
    def gradient_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.round.lane[0]
        return dtype

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.round.lane[1]
        return dtype


@dataclass(frozen=True)
class Moving:
    """What one step reads, by parameter: its group's options (None: AdamW's), what this rank holds of it and of its
    gradient, and the momenta, by block, of those of its matrices that this rank owns."""

    settings: Sequence[Setting | None]
    weights: Weights
    gradients: list[Tensor | None]
    owned: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    _rates: dict[tuple[int, int, int], Rate] = field(default_factory=dict)

    @cached_property
    def manners(self) -> tuple[tuple[str, int, bool] | None, ...]:
        """How options divide matrices into kinds, by group; a μ by its place among those that differ, for it may
        follow a schedule."""
        places: dict[float, int] = {}
        found = []
        for setting in dict.fromkeys(self.settings):
            mode, mu, plain = setting.manner if setting else ("", -1.0, False)
            found.append((mode, places.setdefault(mu, len(places)), plain) if setting else None)
        return tuple(found)

    def setting(self, matrix: Matrix) -> Setting:
        setting = self.settings[matrix.parameter]
        assert setting is not None
        return setting

    def rate(self, matrix: Matrix) -> Rate:
        setting = self.setting(matrix)
        key = setting.index, matrix.rows, matrix.cols
        if key not in self._rates:
            self._rates[key] = setting.rate(matrix.rows, matrix.cols)
        return self._rates[key]

    def kind(self, matrix: Matrix, gradient_dtype: torch.dtype) -> Kind:
        weight = self.weights.local[matrix.parameter]
        return self.setting(matrix).kind(weight, gradient_dtype, matrix.rows, matrix.cols)

    def momentum(self, matrix: Matrix) -> Tensor:
        return self.owned[matrix.parameter][matrix.block]


class Pipeline:
    """Runs stages on one device: at most ``DEPTH`` rounds of gradients and two of updates are under way.

    All transfers are posted in the order of the stages, alike on all ranks. Buffers are kept from step to step.
    On a GPU the host waits for nothing: the current stream orthogonalizes and updates, a second one packs and unpacks,
    and the exchange's carries.
    """

    def __init__(
        self, exchange: Exchange, newton_schulz: GramNewtonSchulz, device: torch.device, traffic: Traffic
    ) -> None:
        self.matrices: Sequence[Matrix] = ()  # those that stages speak of
        self._exchange, self._newton_schulz, self._traffic = exchange, newton_schulz, traffic
        self._inward, self._outward = exchange.slots[:DEPTH], exchange.slots[DEPTH:]
        self._inputs, self._polars = ([Room(device) for _ in range(2)] for _ in range(2))
        self._together: WeakKeyDictionary[Stage, list[list[int]]] = WeakKeyDictionary()
        self._stay: WeakKeyDictionary[Stage, bool] = WeakKeyDictionary()  # by the first of some that go together
        self.beside = Beside(device)

    def reserve(self, stages: Sequence[Stage]) -> None:
        """Room for what arrives in these stages; collective."""
        wanted = [0] * SLOTS
        for index, stage in enumerate(stages):
            inward, outward = index % DEPTH, DEPTH + index % DEPTH
            wanted[inward] = max(wanted[inward], sum(stage.inward.receive_sizes) * stage.gradient_dtype.itemsize)
            wanted[outward] = max(wanted[outward], sum(stage.outward.receive_sizes) * stage.dtype.itemsize)
        self._exchange.reserve(wanted)

    def run(
        self, stages: Sequence[Stage], moving: Moving, meanwhile: Callable[[], None], done: Collection[Stage] = ()
    ) -> None:
        """One step of all of the stages' matrices but those ``done``, and what is to be done ``meanwhile``: as the
        first travel."""
        if self.stay(stages):
            meanwhile()
            for index, stage in enumerate(stages):
                if stage not in done:
                    self.move(stages, index, moving)
            return
        with self.beside.joined():
            self._run(stages, moving, meanwhile)
        for stage in stages:
            self.mark(stage, moving)

    def stay(self, stages: Sequence[Stage]) -> bool:
        """Whether all matrices are whole on their owners, so that the last product updates them where they lie; the
        same on all ranks."""
        if stages and stages[0] not in self._stay:
            self._stay[stages[0]] = all(
                stage.inward.empty and stage.outward.empty
                and all(self.matrices[place].lies_flat for batch in stage.round.batches for place in batch)
                for stage in stages
            )
        return not stages or self._stay[stages[0]]

    def of(self, stage: Stage) -> list[Matrix]:
        """The matrices of this rank's batch."""
        return [self.matrices[place] for place in stage.batch]

    def whole(self, stage: Stage, moving: Moving) -> tuple[list[Tensor], list[Tensor]]:
        """The weights and momenta, (rows, cols) each, of this rank's batch of matrices that stay."""
        matrices = self.of(stage)
        if stage.outward not in moving.weights.whole:
            held = self._held(stage.outward.kept, moving.weights.local)
            moving.weights.whole[stage.outward] = [
                matrix.flat(weight) for matrix, weight in zip(matrices, held, strict=True)
            ]
        return moving.weights.whole[stage.outward], list(map(moving.momentum, matrices))

    def move(self, stages: Sequence[Stage], index: int, moving: Moving) -> None:
        """One step of a stage's matrices, which stay."""
        stage = stages[index]
        posted = self._post_inward(stages, index, moving.gradients)
        gradients = self._assembled(stage, index, posted, moving.gradients)
        weights, momenta = self.whole(stage, moving)
        for kind, some in self._kinds_of(stage, moving):
            given, moved, buffers = ([every[at] for at in some] for every in (gradients, weights, momenta))
            momentum = Momentum(kind.mode, tuple(buffers), kind.mu)
            rates = [moving.rate(self.matrices[stage.batch[at]]) for at in some]
            with phase(f"{len(some)}x{kind.rows}x{kind.cols}"):
                if kind.plain:
                    self._newton_schulz.step(moved, given, momentum, [rate.numbers for rate in rates], index)
                    continue
                polars = torch.empty(len(some), kind.rows, kind.cols, dtype=kind.dtype, device=kind.device)
                self._newton_schulz.directions(given, momentum, polars)
                move(moved, polars, rates)
        self._traffic.ns_runs += len(stage.batch)
        self.mark(stage, moving)

    def mark(self, stage: Stage, moving: Moving) -> None:
        """Weights that are to go to other ranks may do so from here on."""
        if not moving.weights.has_owners:
            return
        mark = self.beside.mark()
        for place in stage.batch:
            whole = whole_of(moving.weights.parameters[self.matrices[place].parameter])
            if whole is not None:
                whole.updated = mark

    def _run(self, stages: Sequence[Stage], moving: Moving, meanwhile: Callable[[], None]) -> None:
        beside = self.beside
        with beside.stream():
            arriving = deque(
                self._post_inward(stages, index, moving.gradients) for index in range(min(DEPTH, len(stages)))
            )
        meanwhile()
        with beside.stream():
            gradients, ready = self._next(stages, 0, arriving, moving)
        leaving: Posted | None = None
        for index, stage in enumerate(stages):
            beside.wait(ready)
            sends, kept = self._orthogonalized(stage, index, gradients, moving)
            done = beside.mark()
            with beside.stream():
                if index + 1 < len(stages):  # before the wait for this chain: the next one needs it
                    gradients, ready = self._next(stages, index + 1, arriving, moving)
                beside.wait(done)
                posted = self._post_outward(stage, index, sends)
            # Not beside the next chain: its persistent blocks need every multiprocessor, and updates would hold some.
            self._arrive(leaving, moving)
            self._update(self._lots(stage.outward, moving)[0], kept, moving)
            leaving = posted
        self._arrive(leaving, moving)

    def _arrive(self, leaving: Posted | None, moving: Moving) -> None:
        """Wait for updates that are under way, which have left their buffer then, and move the weights here by them."""
        if leaving is not None:
            arrived = self._exchange.wait(leaving)
            self._update(self._lots(leaving.transfer, moving)[1], arrived, moving)

    def _next(
        self, stages: Sequence[Stage], index: int, arriving: deque[Posted], moving: Moving
    ) -> tuple[list[Tensor], Mark]:
        """A stage's gradients, and when they are there; those of the stage that takes its buffers are then posted.

        The chain that has read this one's matrices' buffer before, of two, is one that this stream has waited for.
        """
        gradients = self._assembled(stages[index], index, arriving.popleft(), moving.gradients)
        ready = self.beside.mark()
        if index + DEPTH < len(stages):
            arriving.append(self._post_inward(stages, index + DEPTH, moving.gradients))
        return gradients, ready

    def collected(self, stages: Sequence[Stage], local: Local) -> Iterator[tuple[int, Tensor]]:
        """(Place, matrix) of those that this rank owns, from what the ranks hold of them; copies."""
        for index, stage in enumerate(stages):
            whole = self._assembled(stage, index, self._post_inward(stages, index, local, "momentum"), local)
            yield from ((place, matrix.clone()) for place, matrix in zip(stage.batch, whole, strict=True))

    def spread(self, stages: Sequence[Stage], owned: Mapping[int, Tensor], local: Local) -> None:
        """Write what this rank holds of every matrix where ``local`` says, from the owners' matrices by place."""
        for index, stage in enumerate(stages):
            sends, kept = self._leaving(stage, [owned[place] for place in stage.batch])
            posted = self._post_outward(stage, index, sends, "momentum")
            copy(self._held(stage.outward.kept, local), kept)
            copy(self._held(stage.outward.receives, local), self._exchange.wait(posted))

    def _post_inward(self, stages: Sequence[Stage], index: int, local: Local, what: str = "gradients") -> Posted:
        stage = stages[index]
        given = self._held(stage.inward.sends, local)
        slot, what = self._inward[index % DEPTH], f"{what} of round {index}"
        return self._exchange.post(stage.inward, stage.gradient_dtype, slot, given, what)

    def _assembled(self, stage: Stage, index: int, posted: Posted, local: Local) -> list[Tensor]:
        """The matrices of this rank's batch, (rows, cols) each; one that is here as a whole is not copied."""
        received, kept = self._exchange.wait(posted), stage.inward.kept
        if not received and len(kept) == len(stage.batch):
            held = self._held(kept, local)
            return [self.matrices[place].flat(part) for place, part in zip(stage.batch, held, strict=True)]
        numel = len(stage.batch) * self._numel(stage)
        matrices, into, into_kept = self._inputs[index % 2].view(
            stage, numel, stage.gradient_dtype, lambda flat: self._places(stage, flat)
        )
        copy(into, received)
        copy(into_kept, self._held(kept, local))
        return matrices

    def _places(self, stage: Stage, flat: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """A batch's matrices in a buffer, and where in them what arrives, and what is kept, belongs."""
        inward, matrices = stage.inward, list(self._batch(stage, flat).unbind())
        return matrices, self._parts(stage, matrices, inward.receives), self._parts(stage, matrices, inward.kept)

    def _batch(self, stage: Stage, flat: Tensor) -> Tensor:
        first = self.matrices[stage.batch[0]] if stage.batch else None
        return flat.view(len(stage.batch), first.rows, first.cols) if first else flat.view(0, 1, 1)

    def _numel(self, stage: Stage) -> int:
        first = self.matrices[stage.batch[0]] if stage.batch else None
        return first.rows * first.cols if first else 0

    def _parts(self, stage: Stage, matrices: Sequence[Tensor], parcels: Sequence[Parcel]) -> list[Tensor]:
        """The views that parcels are of this batch's matrices."""
        boxed = {place: self.matrices[place].boxed(each) for place, each in zip(stage.batch, matrices, strict=True)}
        return [cut(boxed[parcel.matrix], parcel.fragment.place) for parcel in parcels]

    def _leaving(self, stage: Stage, matrices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The views of a batch that are sent to their holders, and those that are kept."""
        outward = stage.outward
        return self._parts(stage, matrices, outward.sends), self._parts(stage, matrices, outward.kept)

    def _results(self, stage: Stage, flat: Tensor) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]]]:
        """A batch in a buffer, (matrices, rows, cols), and what of it leaves."""
        matrices = self._batch(stage, flat)
        return matrices, self._leaving(stage, matrices.unbind())

    def _held(self, parcels: Sequence[Parcel], local: Local) -> list[Tensor]:
        """The views that parcels are of what this rank holds."""
        found = []
        for parcel in parcels:
            tensor = local[self.matrices[parcel.matrix].parameter]
            assert tensor is not None
            found.append(parcel.fragment.of(tensor))
        return found

    def _orthogonalized(
        self, stage: Stage, index: int, gradients: Sequence[Tensor], moving: Moving
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What leaves and what is kept of the polar factors of this rank's batch, in the weights' dtype."""
        numel = len(stage.batch) * self._numel(stage)
        room = self._polars[index % 2]
        polars, leaving = room.view(stage, numel, stage.dtype, lambda flat: self._results(stage, flat))
        kinds = self._kinds_of(stage, moving)
        for kind, some in kinds:
            momenta = tuple([moving.momentum(self.matrices[stage.batch[at]]) for at in some])
            given = [gradients[at] for at in some]
            # The options of their groups seldom part matrices that are together in a batch.
            into = polars if len(kinds) == 1 else torch.empty_like(polars[: len(some)])
            with phase(f"{len(some)}x{kind.rows}x{kind.cols}"):
                self._newton_schulz.directions(given, Momentum(kind.mode, momenta, kind.mu), into)
            if into is not polars:
                copy([polars[at] for at in some], list(into.unbind()))
        self._traffic.ns_runs += len(stage.batch)
        return leaving

    def kinds(self, batch: Sequence[int], gradient_dtype: torch.dtype, moving: Moving) -> dict[Kind, list[int]]:
        """The places in an owner's batch, by what matrices must share to run together."""
        kinds: dict[Kind, list[int]] = {}
        for at, place in enumerate(batch):
            kinds.setdefault(moving.kind(self.matrices[place], gradient_dtype), []).append(at)
        return kinds

    def _kinds_of(self, stage: Stage, moving: Moving) -> list[tuple[Kind, list[int]]]:
        """The same of a stage's own batch; what of it runs together is the same at every step with the stage."""
        if stage not in self._together:
            self._together[stage] = list(self.kinds(stage.batch, stage.gradient_dtype, moving).values())
        firsts = (self.matrices[stage.batch[some[0]]] for some in self._together[stage])
        return [(moving.kind(first, stage.gradient_dtype), some)
                for first, some in zip(firsts, self._together[stage], strict=True)]

    def _post_outward(self, stage: Stage, index: int, given: Sequence[Tensor], what: str = "updates") -> Posted:
        slot, what = self._outward[index % DEPTH], f"{what} of round {index}"
        return self._exchange.post(stage.outward, stage.dtype, slot, given, what)

    def _lots(self, transfer: Transfer, moving: Moving) -> tuple[list[Lot], list[Lot]]:
        """The weights that a transfer of updates moves: by what is kept, and by what arrives."""
        known = moving.weights.lots
        if transfer not in known:
            known[transfer] = self._cut(transfer.kept, moving), self._cut(transfer.receives, moving)
        return known[transfer]

    def _cut(self, parcels: Sequence[Parcel], moving: Moving) -> list[Lot]:
        lots: dict[Any, Lot] = {}
        for place, (parcel, weight) in enumerate(zip(parcels, self._held(parcels, moving.weights.local), strict=True)):
            matrix = self.matrices[parcel.matrix]
            alike = moving.setting(matrix).index, matrix.rows, matrix.cols, weight.shape
            lot = lots.setdefault(alike, Lot(matrix))
            lot.weights.append(weight)
            lot.places.append(place)
        return list(lots.values())

    def _update(self, lots: Sequence[Lot], polars: Sequence[Tensor], moving: Moving) -> None:
        """Move the weights that this rank holds, as the optimizer of one process would."""
        if not lots:
            return
        with phase("apply"):
            alike: dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]] = {}
            for lot in lots:
                rate, some = moving.rate(lot.matrix), [polars[place] for place in lot.places]
                if rate.plain:
                    weights, directions = alike.setdefault(rate.numbers, ([], []))
                    weights += lot.weights
                    directions += some
                else:
                    move(lot.weights, torch.stack(some), [rate] * len(some))
            for (decay, factor), (weights, directions) in alike.items():
                move_alike(weights, directions, decay, factor)

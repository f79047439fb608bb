"""The distributed part of Muon: ranks agree on each step, gradients go to the owners and updates to the shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dmuon_tune.errors import UsageError

from ..batches import are_finite
from ..newton_schulz import GramNewtonSchulz, cut_batch
from ..ownership import Assignment
from ..ownership_options import OwnershipOptions
from ..phases import phase
from ..plan import Plan
from ..report import MatrixReport, Report, report
from .adamw import LocalAdamW, Part, like
from .agreement import Agreement, Wanted
from .clipping import clip_by_last_, clip_factor
from .control import Control
from .directions import directions
from .early import Early, Foreseen
from .exchange import Exchange, Traffic, to_holders, to_owners
from .gradients import NO_GRADIENT, code_of, complete, disagreement, dtype_of
from .held import Weights
from .options import check_alike, digest, options_of
from .pieces import Matrix, local_of, shard_of
from .pipeline import SLOTS, Moving, Pipeline, Stage
from .placement import Found, Survey, found_of, owners_of, survey
from .reading import Reading
from .rounds import Item, Lane, rounds
from .whole import Keeper, check_reduced, is_elsewhere, weight_of, whole_of
from .wholes import checked_keepers, collect, spread

if TYPE_CHECKING:
    from ..muon import Muon

MAX_SCHEDULES = 8  # that are kept, where other parameters have gradients from step to step

_OPPOSITE = bytes(range(255, -1, -1))  # of a byte: the largest of these is that of the least


class Gather:
    """What a :class:`Muon` whose parameters lie on the ranks of ``group`` does together with the others.

    A matrix's momentum is on its owner alone, in ``state[p]["owned"]``, by block. All ranks call the optimizer's
    methods in the same order; where one raises, each does.
    """

    def __init__(
        self, group: ProcessGroup, newton_schulz: GramNewtonSchulz, momentum_dtype: torch.dtype | None,
        bucket_bytes: int, timeout: float, profile: bool, ownership: OwnershipOptions,
    ) -> None:
        self.traffic = Traffic()
        self.assignment: Assignment | None = None
        self._group, self._newton_schulz, self._momentum_dtype = group, newton_schulz, momentum_dtype
        self._bucket_bytes, self._timeout, self._profile = bucket_bytes, timeout, profile
        self._ownership = ownership
        self._made: Control | None = None
        self._agreements: dict[torch.device, Agreement] = {}
        self._plan: Plan | None = None
        self._resolved: set[tuple[int, Wanted]] = set()  # by rank
        self._owners: dict[tuple[Tensor, int], int] = {}  # by parameter and block
        self._survey = Survey()
        self._owner: list[int] = []
        self._schedules: dict[tuple[Any, ...], list[Stage]] = {}  # by what gradients there are, and manners
        self._whole: list[Stage] = []  # of a step in which every matrix moves
        self._checkpoints: dict[tuple[int, ...], list[Stage]] = {}  # by the parameters that have momentum
        self._pipelines: dict[torch.device, Pipeline] = {}
        self._keepers: list[Keeper] = []  # of parameters that have an owner
        self._early = Early(self.traffic)
        self._clipped: dict[str, Any] = {}  # how the gradients of the next step were, which all ranks must have alike
        self._last: tuple[bytes, list[Stage]] = b"", []  # what gradients there were in the last step, and its stages

    @property
    def control(self) -> Control:
        """Made when it is first needed, by all ranks together."""
        if self._made is None:
            self._made = Control(self._group, self._timeout)
        return self._made

    def place(self, optimizer: Muon) -> tuple[Plan, ...]:
        """Agree on where all matrices are, whose they are and which kernels run; collective. Returns this rank's."""
        found, error = list[Found](), None
        self._early.drop()
        try:
            optimizer._check_groups()
            self._keepers = checked_keepers(optimizer)
            found = found_of(optimizer)
            devices = {local_of(each.tensor).device for each in found if each.blocks is not None}
            if len(devices) > 1:
                raise UsageError(f"matrices are on {len(devices)} devices; a rank needs all of them on one")
        except Exception as raised:
            error = raised
        self._survey = survey(found, self._group, self.control, error)
        check_alike(self._given(optimizer), self.control)
        device = next(iter(devices), torch.device("cpu"))
        self._own(found, device)
        self._agreement = self._agreements.setdefault(device, Agreement(self._newton_schulz, device, self.control))
        if any(self.control.agree("devices", [device not in self._pipelines])):
            exchange = Exchange(self._group, self.control, self.traffic, device, SLOTS)
            self._pipelines[device] = Pipeline(exchange, self._newton_schulz, device, self.traffic)
        self._pipeline = self._pipelines[device]  # which keeps its buffers
        self._pipeline.matrices = self._survey.matrices
        own = [place for place, owner in enumerate(self._owner) if owner == self.control.rank]
        self._reading = Reading(self._survey.matrices, own, self._momentum_dtype)
        self._adamw = LocalAdamW()
        self._schedules.clear()
        self._checkpoints.clear()
        self._last = b"", []
        codes = bytes(code_of(each.tensor, weight_of(each.tensor)) if each.moves else NO_GRADIENT for each in found)
        moving = self._reading.of(optimizer, Weights([each.tensor for each in found]), [None for _ in found])
        self._whole = self._scheduled(codes, moving)
        optimizer._planned = True
        return (self._plan,) if self._plan and self._plan.groups else ()

    def ready(self, optimizer: Muon, what: str = "", error: Exception | None = None) -> None:
        """All ranks are in ``what``, none with an ``error``, and have agreed where everything is; collective."""
        if what:
            self._early.drop()
            self.control.agree(what, error=error)
        if not optimizer._planned:
            self.place(optimizer)

    def early(self, optimizer: Muon, max_norm: float | None) -> AbstractContextManager[None]:
        """Inside it owners begin the next step, where it can be one like the last."""
        (codes, stages), last, factor = self._last, optimizer.grad_norm, None
        if max_norm is not None:
            self._clipped = {"early_step: max_norm": float(max_norm), "early_step: has grad_norm": last is not None}
            factor = None if last is None else clip_factor(max_norm, last)
        is_known = max_norm is None or factor is not None  # what gradients will be
        if not optimizer._planned or not stages or not self._pipeline.stay(stages) or not is_known:
            return self._early.opened(checked_keepers(optimizer), None)
        moving = self._reading.foreseen(optimizer, codes)
        foreseen = None if moving is None else Foreseen(self._pipeline, stages, moving, factor)
        return self._early.opened(self._keepers, foreseen)

    def clip(self, optimizer: Muon, max_norm: float) -> Tensor:
        """At the end of :meth:`early`; the norm by which the next step's gradients are to be clipped; collective."""
        with self._early.clipping():
            return clip_by_last_(optimizer, max_norm, optimizer.grad_norm, self._group)

    def step(self, optimizer: Muon) -> bool:
        """One update of all parameters, wherever they are; False where it was skipped for NaN or inf; collective."""
        self.control.step += 1
        try:
            return self._step(optimizer)
        finally:
            self._early.drop()  # what was not part of it
            self._clipped = {}
            for keeper in self._keepers:
                keeper.step = self.control.step + 1

    def _step(self, optimizer: Muon) -> bool:
        self.ready(optimizer)
        with phase("check"):
            agreed = self._agreed(optimizer)
        if agreed is None:
            return False
        codes, moving = agreed
        stages = self._scheduled(codes, moving)
        done = self._early.claimed(stages, moving, lambda: self._reading.is_steady(optimizer, moving, codes))
        with self.control.guard("step"):
            for keeper in self._keepers:
                keeper.release()
            complete(moving.weights.parameters, moving.gradients, codes)
            self._reading.carry(optimizer, moving, codes)
            with phase("exchange"):
                self._pipeline.run(stages, moving, lambda: self._step_adamw(optimizer, moving, codes), done)
        self._last = codes, stages
        self.traffic.steps += 1
        return True

    def _step_adamw(self, optimizer: Muon, moving: Moving, codes: bytes) -> None:
        parts, start = list[Part](), 0
        for group in optimizer.param_groups:
            its = slice(start, start := start + len(group["params"]))
            if not group["use_muon"]:
                columns = group["params"], moving.weights.local[its], moving.gradients[its]
                parts.append(Part(group, *(list(compress(column, codes[its])) for column in columns)))
        with phase("AdamW"):
            self._adamw.step(parts, optimizer.state, (moving.weights, codes))

    def state(self, optimizer: Muon) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state as its checkpoints have it: momenta lie as their parameters do; collective."""
        parameters, local, error = list(optimizer._parameters()), dict[int, Tensor](), None
        state = {p: {key: value for key, value in its.items() if key != "owned"} for p, its in optimizer.state.items()}
        try:
            for index, p in enumerate(parameters):
                if "owned" in optimizer.state.get(p, {}) and whole_of(p) is None:
                    local[index] = torch.empty_like(local_of(p), dtype=self._momentum_dtype)
                    state[p]["momentum_buffer"] = like(p, local[index])
        except Exception as raised:  # such as too little memory
            error = raised
        self.ready(optimizer, "state_dict", error)
        owned = {
            place: optimizer.state[parameters[matrix.parameter]]["owned"][matrix.block]
            for place, matrix in enumerate(self._survey.matrices)
            if matrix.parameter in local and self._owner[place] == self.control.rank
        }
        with self.control.guard("state_dict"):
            self._pipeline.spread(self._momenta(parameters, local), owned, local)
            for p, momentum in spread(optimizer, self._survey.matrices, self._momentum_dtype):
                state[p]["momentum_buffer"] = momentum
        return state

    def take(self, optimizer: Muon, error: Exception | None) -> None:
        """Bring state that a checkpoint's loading has left on the parameters to where steps have it; collective.

        ``error`` is why it could not be loaded here; it is raised, and on the other ranks too.
        """
        self.control.agree("load_state_dict", error=error)
        self.place(optimizer)
        parameters, local, wholes = list(optimizer._parameters()), dict[int, Tensor](), dict[int, Tensor]()
        try:
            for index, p in enumerate(parameters):
                its = optimizer.state.get(p, {})
                if whole_of(p) is not None:
                    if "momentum_buffer" in its:
                        wholes[index] = its["momentum_buffer"]
                    continue
                for key, value in its.items():
                    if isinstance(value, Tensor) and value.shape == p.shape and key != "step":
                        its[key] = self._placed(index, p, value)
                if "momentum_buffer" in its:
                    local[index] = local_of(its["momentum_buffer"])
        except UsageError as raised:
            error = UsageError(f"{found_of(optimizer)[index].name}: its {key}: {raised}")
        except Exception as raised:  # such as too little memory
            error = raised
        has = [index in local or index in wholes for index in range(len(parameters))]
        flags = self.control.agree("loaded", [*has, *(not each for each in has)], error)
        if any(both == (1, 1) for both in zip(flags[: len(has)], flags[len(has) :], strict=True)):
            raise UsageError("ranks have been given momenta of different parameters; load the same checkpoint on all")
        for index in (*local, *wholes):
            its = optimizer.state[parameters[index]]
            del its["momentum_buffer"]
            its["owned"] = {}
        matrices = self._survey.matrices
        stages = self._momenta(parameters, local)
        with self.control.guard("load_state_dict"):
            for place, whole in self._pipeline.collected(stages, local):
                optimizer.state[parameters[matrices[place].parameter]]["owned"][matrices[place].block] = whole
            for index, value in wholes.items():
                optimizer.state[parameters[index]]["owned"] = collect(optimizer, index, matrices, value)

    def report(self, optimizer: Muon, spectra: bool) -> Report:
        """Every matrix that moves, by its owner's momentum alone, for its gradient is in pieces; collective."""
        self.ready(optimizer, "report")
        own, error = list[tuple[int, dict[str, Any]]](), None
        try:
            for stage in self._whole:
                given = directions(optimizer, self._survey.matrices, stage.batch)
                found = report(self._newton_schulz, given, spectra, 0).matrices
                own += [(place, asdict(each)) for place, each in zip(stage.batch, found, strict=True)]
        except Exception as raised:  # such as too little memory
            error = raised
        by_place = {
            place: MatrixReport(**{**fields, "owner": rank})
            for rank, some in enumerate(self.control.gather(own, "report", error)) for place, fields in some
        }
        return Report(tuple(by_place[place] for place in sorted(by_place)), optimizer.skipped_steps, *optimizer._choice)

    def _placed(self, index: int, p: Tensor, value: Tensor) -> Tensor:
        """A tensor of a parameter's shape, placed like it."""
        held = self._survey.held[index]
        if isinstance(value, DTensor):
            if isinstance(p, DTensor) and value.device_mesh == p.device_mesh and value.placements == p.placements:
                return value
            raise UsageError("it is placed otherwise than the parameter; load it by torch.distributed.checkpoint")
        return like(p, shard_of(value, held)) if isinstance(p, DTensor) and held is not None else value

    def _momenta(self, parameters: Sequence[Tensor], moved: Collection[int]) -> list[Stage]:
        """The stages in which the momenta of these parameters travel."""
        key = tuple(sorted(moved))
        if key not in self._checkpoints:
            dtypes = [self._momentum_dtype or local_of(p).dtype for p in parameters]
            places = [place for place, matrix in enumerate(self._survey.matrices) if matrix.parameter in moved]
            self._checkpoints[key] = self._stages(places, [(dtype, dtype) for dtype in dtypes])
            _bound(self._checkpoints)
        return self._checkpoints[key]

    def _own(self, found: Sequence[Found], device: torch.device) -> None:
        """Decide who owns the matrices that nobody owns yet: whoever owns one has its momentum."""
        def key(matrix: Matrix) -> tuple[Tensor, int]:
            return found[matrix.parameter].tensor, matrix.block

        for place, matrix in enumerate(self._survey.matrices):
            whole = whole_of(found[matrix.parameter].tensor)
            if whole is not None:
                self._owners[key(matrix)] = whole.owner
            elif not found[matrix.parameter].moves:  # and so it costs its owner nothing
                self._owners.setdefault(key(matrix), place % self.control.size)
        for keeper in self._keepers:
            self.assignment = keeper.assignment
        new = [matrix for matrix in self._survey.matrices if key(matrix) not in self._owners]
        if new:
            owned = [(each, self._owners[key(each)]) for each in self._survey.matrices if key(each) in self._owners]
            self.assignment = owners_of(
                new, owned, found, self._momentum_dtype, self.control, self._newton_schulz, device,
                self._bucket_bytes, self._profile, self._ownership,
            )
            self._owners |= {key(matrix): owner for matrix, owner in zip(new, self.assignment.owner, strict=True)}
        self._owner = [self._owners[key(matrix)] for matrix in self._survey.matrices]

    def _agreed(self, optimizer: Muon) -> tuple[bytes, Moving] | None:
        """What gradient every parameter has, on all ranks, and what is read of this step; None where a gradient is not
        finite and the step is skipped.

        Raises on all ranks, before anything has changed, for what any of them cannot use.
        """
        options, finite, error = dict[str, Any](), True, None
        parameters = list(optimizer._parameters())
        told = bytes(len(parameters))  # no gradient
        try:
            check_reduced(self._keepers)
            told, moving = self._reading.next(optimizer, parameters, self._adamw.has_left(optimizer.state))
            options = options_of(optimizer.param_groups) | self._clipped
            finite = not optimizer._skip_nonfinite or are_finite(
                each for p, each in zip(parameters, moving.gradients, strict=True)
                if each is not None and not is_elsewhere(p)
            )
        except Exception as raised:
            error = raised
        told += digest(options)
        flags = bytes([not finite]) + told + told.translate(_OPPOSITE)
        nonfinite, *both = self.control.agree("gradients", flags, error)
        most, least = bytes(both[: len(told)]), bytes(both[len(told) :]).translate(_OPPOSITE)
        codes = most[: len(parameters)]
        if most != least:
            if most[len(codes) :] != least[len(codes) :]:
                check_alike(options, self.control)
            for index, p in enumerate(parameters):
                reason = disagreement(p, self._survey.indivisible[index], least[index], most[index])
                if reason is not None:
                    raise UsageError(f"{found_of(optimizer)[index].name}: {reason}")
        return None if nonfinite else (codes, moving)

    def _given(self, optimizer: Muon) -> dict[str, Any]:
        """The constructor's options that all ranks must have alike."""
        chains = self._newton_schulz
        return {
            "steps": len(chains.triples), "coefficients": chains.triples, "restarts": chains.restarts,
            "eps": float(chains.eps), "ns_dtype": str(chains.dtype), "momentum_dtype": str(self._momentum_dtype),
            "bucket_bytes": self._bucket_bytes, "profile": self._profile, "skip_nonfinite": optimizer._skip_nonfinite,
            **{f"ownership.{option}": value for option, value in vars(self._ownership).items()},
        }

    def _scheduled(self, codes: bytes, moving: Moving) -> list[Stage]:
        """The stages of a step in which gradients are as ``codes`` say, with their kernels; made once."""
        settings = moving.settings
        own = tuple(NO_GRADIENT if setting is None else code for code, setting in zip(codes, settings, strict=True))
        key = *own, moving.manners
        if key not in self._schedules:
            lanes = [(dtype_of(code), p.dtype) for code, p in zip(own, moving.weights.local, strict=True)]
            moves = [place for place, matrix in enumerate(self._survey.matrices) if own[matrix.parameter]]
            stages = self._stages(moves, lanes)
            self._resolve(stages, moving)
            self._schedules[key] = stages
            _bound(self._schedules)
        return self._schedules[key]

    def _stages(self, moves: Sequence[int], lanes: Sequence[Lane]) -> list[Stage]:
        """The rounds in which matrices, by place, move, and this rank's part of them; ``lanes`` are by parameter."""
        matrices, rank = self._survey.matrices, self.control.rank
        items = []
        for place in moves:
            matrix = matrices[place]
            lane = lanes[matrix.parameter]
            nbytes = matrix.rows * matrix.cols * max(dtype.itemsize for dtype in lane)
            items.append(Item(place, lane, matrix.rows, matrix.cols, self._owner[place], nbytes))
        stages = [
            Stage(each, each.batches[rank], to_owners(each, matrices, rank), to_holders(each, matrices, rank))
            for each in rounds(items, self.control.size, self._bucket_bytes)
        ]
        self._pipeline.reserve(stages)
        return stages

    def _resolve(self, stages: Sequence[Stage], moving: Moving) -> None:
        """Kernels for the batches that this rank runs, as the first rank decides; collective, unless every rank has
        those of its own: each one knows the batches of all."""
        stay = self._pipeline.stay(stages)
        every = {
            (owner, one) for stage in stages for owner, batch in enumerate(stage.round.batches)
            for one in self._wanted(stage, batch, moving, stay)
        }
        if not every <= self._resolved:
            self._plan = self._agreement.prepare(one for owner, one in sorted(every) if owner == self.control.rank)
            self._resolved |= every

    def _wanted(self, stage: Stage, batch: Sequence[int], moving: Moving, stay: bool) -> Iterator[Wanted]:
        for kind, places in self._pipeline.kinds(batch, stage.gradient_dtype, moving).items():
            for _, group in cut_batch(len(places), kind.rows, kind.cols):
                yield Wanted.of(group, kind.gradient_dtype, kind.mode, kind.dtype, stay and kind.plain)


def _bound(schedules: dict[Any, Any]) -> None:
    """Drop the oldest; the same ones on all ranks, as all have the same."""
    while len(schedules) > MAX_SCHEDULES:
        del schedules[next(iter(schedules))]

"""Executes one group's plan: matrices where they lie → polar factors where they are wanted, by graph replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from logging import getLogger

import torch
from torch import Tensor

from dmuon_tune import chains
from dmuon_tune.chains import Last
from dmuon_tune.coefficients import CoefficientSet, Triple
from dmuon_tune.kernel_specs.momentum_library import update
from dmuon_tune.kernel_specs.polar_small import input_scale

from .ends import Ends, Launch
from .phases import is_watched, phase
from .placed import Matrices, Placed, addresses, aligned, contiguous, spaced, writable
from .plan import GroupPlan
from .static import Constant, Workspace, capturing
from .updates import move_by_numbers

MAX_WHOLE_GRAPHS = 4  # results that a loop keeps at a time; the caching allocator hands out their addresses in turn

logger = getLogger("dmuon_tune.runtime")


@dataclass(frozen=True)
class Momentum:
    """How U comes of gradients: ``mode`` none (they are U), m (accumulated) or n (Nesterov) with the buffers and μ."""

    mode: str = "none"
    buffers: tuple[Tensor, ...] = ()
    mu: float = 0.0


GIVEN = Momentum()  # U itself is given


@dataclass(frozen=True)
class _Piece:
    """Matrices ``part`` of a batch, orthogonalized but for the last product; ``direct``: that reads them themselves,
    ``fused``: what updates the weights in it."""

    index: int
    part: slice
    size: int
    last: Last
    direct: bool
    fused: Launch | None = None
    where: Sequence[int] = ()  # those weights lie


# What a graph is of: a piece (a whole chain's is of its result's address), and those launches at its ends that not all
# graphs of it have.
_Key = tuple[int, Launch | None, Launch | None]
_Buffers = tuple[Tensor, Tensor, list[Tensor], list[Tensor]]  # X, Y, those of chains.work and of chains.tables


@dataclass(frozen=True)
class _Replay:
    graph: torch.cuda.CUDAGraph
    last: Last
    version: int


class GroupChain:
    """One group's chain on one device: eager at its first call, by graph from then on where ``graphs``.

    The last launch stays outside the graphs, and so does a first one with momentum: they hold no address of the
    caller's, no μ and no rate. Where a result's address comes again, its whole chain becomes one more graph.
    """

    def __init__(
        self, planned: GroupPlan, workspace: Workspace, triples: Sequence[Triple], coefficients: CoefficientSet,
        eps: float, graphs: bool,
    ) -> None:
        self._planned, self._workspace, self._triples = planned, workspace, triples
        self._norm_factor, self._eps = coefficients.norm_factor, eps / coefficients.norm_factor
        self._graphs = graphs and workspace.device.type == "cuda"
        self._called: set[_Key] = set()
        self._replays: dict[_Key, _Replay] = {}
        self._recent: deque[_Key] = deque(maxlen=2 * MAX_WHOLE_GRAPHS)
        self._wholes: dict[_Key, _Replay] = {}
        self._buffers: tuple[int, _Buffers] | None = None  # of the workspace's version
        device, pieces = workspace.device, planned.recipe.pieces
        self._device, self._sizes, self._whole = device, pieces, len(pieces) == 1
        self._parts = [slice(end - size, end) for size, end in zip(pieces, accumulate(pieces), strict=True)]
        self._placed: dict[int, Placed] = {}  # by the batch's place among those of one call
        recipe = planned.recipe
        self._small = recipe.form == "small"
        tables = chains.tables(recipe.form, triples, recipe.restarts, recipe.group.m)
        self._coefficients = [Constant(device, rows) for rows in tables]
        self._work_of = chains.work(recipe.form, max(pieces), recipe.group.m, recipe.dtype)

    def polar(self, matrices: Tensor, ends: Ends, out: Tensor) -> None:
        """The polar factors of a batch, (..., rows, cols), into ``out``, contiguous, of its shape and of the dtype that
        ``ends`` are made for."""
        if self._replayed(matrices, ends, out):
            return
        with torch.no_grad():
            workspace, shape = self._entered(), (-1, *out.shape[-2:])
            matrices, out = matrices.detach().contiguous().view(shape), out.view(shape)
            if self._graphs and self._whole and not self._small and workspace is self._workspace:
                self._capture_whole(matrices, ends, out)
                if self._replayed(matrices, ends, out):
                    return
            for piece in self._pieces(matrices, GIVEN, ends, workspace, self._placed_at(0, workspace)):
                self._write(piece, ends, out if self._whole else out[piece.part], workspace)

    def _replayed(self, matrices: Tensor, ends: Ends, out: Tensor) -> bool:
        """Whether there was a graph of all that writes this result, which then ran."""
        held = self._wholes.get((out.data_ptr(), ends.first, None))
        if held is None or held.version != self._workspace.version or not matrices.is_contiguous():
            return False
        if capturing(self._device):
            return False
        self._workspace.follow()
        self._placed_at(0, self._workspace).gradients.holding(spaced(matrices, self._planned.recipe.group.batch))
        held.graph.replay()
        return True

    def _capture_whole(self, matrices: Tensor, ends: Ends, out: Tensor) -> None:
        """Make the graph of all that writes this result, where its address comes again."""
        key, version = (out.data_ptr(), ends.first, None), self._workspace.version
        held = self._wholes.get(key)
        if held is not None and held.version == version:
            return
        if any(other.version != version for other in self._wholes.values()):
            self._wholes.clear()
        if key not in self._recent:
            self._recent.append(key)
            return
        if ends.first is None or len(self._wholes) == MAX_WHOLE_GRAPHS or not writable(out):
            return
        buffers = self._work(self._workspace)
        first = self._first(matrices, GIVEN, ends, buffers[0], self._placed_at(0, self._workspace))
        part = slice(0, self._sizes[0])

        def launched() -> Last:
            first()
            last = self._all_but_last(part, buffers)
            self._write(_Piece(0, part, self._sizes[0], last, False), ends, out, self._workspace)
            return last

        held = self._captured(launched)
        if held is None:
            self._graphs = False
        else:
            self._wholes[key] = held

    def step(
        self, gradients: Matrices, momentum: Momentum, ends: Ends, weights: Sequence[Tensor],
        rates: Sequence[tuple[float, float]], place: int = 0,
    ) -> None:
        """W ← decay·W − rate·polar, for each of the weights with its (decay, rate).

        ``place``: which of the batches of this group that a step runs; the addresses of each stay on the device. Where
        there is no momentum the first's are in the graph.
        """
        workspace = self._entered()
        placed = self._placed_at(place if momentum.buffers else 0, workspace)
        if self._step_by_graph(gradients, momentum, ends, weights, rates, workspace, placed):
            return
        for piece in self._pieces(gradients, momentum, ends, workspace, placed, weights):
            with phase("update"):
                self._update(piece, ends, weights[piece.part], rates[piece.part], workspace, placed)

    def _step_by_graph(
        self, gradients: Matrices, momentum: Momentum, ends: Ends, weights: Sequence[Tensor],
        rates: Sequence[tuple[float, float]], workspace: Workspace, placed: Placed,
    ) -> bool:
        """Whether one graph of a whole step did it: of launches that read all but μ where ``placed`` holds it.

        It is made when the same launches come a second time with the same μ, and not while phases are watched.
        """
        fused, where = [ends.weights.get(size) for size in self._sizes], addresses(weights)
        if not self._graphs or workspace is not self._workspace or is_watched() or not all(fused):
            return False
        if not (momentum.buffers and aligned(where) and contiguous(weights)):
            return False
        buffers = self._work(workspace)
        first = self._first(gradients, momentum, ends, buffers[0], placed)
        launches = first.func, momentum.mu, *fused
        if first.func is not ends.first or placed.launches != launches:
            placed.launches, placed.replay = launches, None
            return False
        tables = [placed.weights(index, where[part], rates[part]) for index, part in enumerate(self._parts)]
        if placed.replay is None or placed.replay.version != workspace.version:
            placed.replay = self._captured(partial(self._whole_step, first, ends, buffers, tables))
            if placed.replay is None:
                self._graphs = False
                return False
        placed.replay.graph.replay()
        return True

    def _whole_step(
        self, first: partial[None], ends: Ends, buffers: _Buffers, tables: Sequence[tuple[Tensor, Tensor]]
    ) -> Last:
        first()
        for part, size, table in zip(self._parts, self._sizes, tables, strict=True):
            last = self._all_but_last(part, buffers, ends.with_identity.get(size))
            ends.weights[size](last.q, last.x, *table, *last.scalars)
        return last

    def directions(self, gradients: Matrices, momentum: Momentum, ends: Ends, out: Tensor, place: int = 0) -> None:
        """The polar factors of U, as ``momentum`` says, into ``out``, contiguous and of the dtype of ``ends``.

        ``place`` as for :meth:`step`.
        """
        workspace = self._entered()
        placed = self._placed_at(place if momentum.buffers else 0, workspace)
        for piece in self._pieces(gradients, momentum, ends, workspace, placed):
            with phase("update"):
                self._write(piece, ends, out[piece.part], workspace)

    def _update(
        self, piece: _Piece, ends: Ends, weights: Sequence[Tensor], rates: Sequence[tuple[float, float]],
        workspace: Workspace, placed: Placed,
    ) -> None:
        if piece.fused is not None:
            tables = placed.weights(piece.index, piece.where, rates)
            piece.fused(piece.last.q, piece.last.x, *tables, *piece.last.scalars)
        else:
            polar = workspace.buffer("polar", (piece.size, *weights[0].shape), weights[0].dtype)
            self._write(piece, ends, polar, workspace)
            move_by_numbers(weights, polar.unbind(), rates)

    def _entered(self) -> Workspace:
        """The shared buffers; in a capture of the caller's buffers of its own, which its graph then keeps."""
        if capturing(self._device):
            return Workspace(self._device)
        self._workspace.follow()
        return self._workspace

    def _placed_at(self, place: int, workspace: Workspace) -> Placed:
        """Those of one of the batches; in a capture of the caller's new ones."""
        if workspace is not self._workspace:
            return Placed(self._device, len(self._sizes), in_capture=True)
        if place not in self._placed:
            self._placed[place] = Placed(self._device, len(self._sizes))
        return self._placed[place]

    def _pieces(
        self, matrices: Matrices, momentum: Momentum, ends: Ends, workspace: Workspace, placed: Placed,
        weights: Sequence[Tensor] = (),
    ) -> Iterator[_Piece]:
        """Orthogonalize piece by piece; the next one overwrites what the last product of one reads. ``weights`` are
        those to be updated, where they can be in the last product."""
        direct = False
        if self._small and momentum.mode == "none" and isinstance(matrices, Tensor) and self._reads(matrices, ends):
            direct, buffers = True, (matrices, matrices, list[Tensor](), self._tables())
        else:
            buffers = self._work(workspace)
        x, y, _, tables = buffers
        first = None if direct else self._first(matrices, momentum, ends, x, placed)
        if first is not None and (self._small or momentum.mode != "none" or ends.first is None):
            with phase("momentum"):
                first()
            first = None
        for index, (part, size) in enumerate(zip(self._parts, self._sizes, strict=True)):
            members = weights[part]
            where = addresses(members)
            fused = ends.weights.get(size) if members and aligned(where) and contiguous(members) else None
            if self._small:
                u, spare = (x, y) if self._whole else (x[part], y[part])
                last = Last(u, tables[0], spare, (self._norm_factor,))
            else:
                with_identity = ends.with_identity.get(size) if fused is not None else None
                begun = first if index == 0 else None
                with phase("chain"):
                    last = self._products(index, part, buffers, workspace, begun, with_identity)
            yield _Piece(index, part, size, last, direct, fused, where)

    def _reads(self, matrices: Tensor, ends: Ends) -> bool:
        """Whether the small form reads these matrices themselves."""
        matrix_bytes = matrices.nbytes // matrices.shape[0]
        apart = 0 if self._whole else matrix_bytes
        return aligned([matrices.data_ptr(), apart]) and all(size in ends.direct for size in self._sizes)

    def _work(self, workspace: Workspace) -> _Buffers:
        """The chain's buffers; in a capture of our own those of before, for its graph must not write coefficients."""
        own = workspace is self._workspace
        if own and self._buffers is not None and self._buffers[0] == workspace.version:
            return self._buffers[1]
        recipe, group = self._planned.recipe, self._planned.recipe.group
        dtype: torch.dtype = getattr(torch, recipe.dtype)
        x, y = (workspace.buffer(name, (group.batch, group.rows, group.cols), dtype) for name in ("x", "y"))
        work = [
            workspace.buffer(each.name, each.shape, getattr(torch, each.dtype), each.role == "zeros")
            for each in self._work_of
        ]
        buffers = x, y, work, self._tables()
        if own:
            self._buffers = workspace.version, buffers
        return buffers

    def _tables(self) -> list[Tensor]:
        """The coefficients that launches read."""
        return [each.tensor() for each in self._coefficients]

    def _first(
        self, matrices: Matrices, momentum: Momentum, ends: Ends, x: Tensor, placed: Placed
    ) -> partial[None]:
        """The launch of x = input_scale · U / (norm_factor · ‖U‖_F + eps), rounded once."""
        scale = input_scale(self._planned.recipe.group.m) / self._norm_factor
        buffers = momentum.buffers
        alike = {buffer.dtype for buffer in buffers} <= {matrices[0].dtype} and contiguous(buffers)
        if ends.first is None or not alike:
            return partial(update, list(matrices), buffers, x, momentum.mode, momentum.mu, scale, self._eps)
        gradients = placed.gradients.holding(addresses(matrices))
        if momentum.mode == "none":
            return partial(ends.first, gradients, x, scale, self._eps)
        momenta = placed.momenta.holding(addresses(buffers))
        return partial(ends.first, gradients, momenta, x, momentum.mu, scale, self._eps)

    def _products(
        self, index: int, part: slice, buffers: _Buffers, workspace: Workspace, first: partial[None] | None,
        with_identity: Launch | None,
    ) -> Last:
        """Every product of one piece but the last, after the ``first`` launch where there is one."""
        def launched() -> Last:
            if first is not None:
                first()
            return self._all_but_last(part, buffers, with_identity)

        if not self._graphs or workspace is not self._workspace:
            return launched()
        key = index, None if first is None else first.func, with_identity
        held = self._replays.get(key)
        if held is None or held.version != workspace.version:
            if key not in self._called:  # what is loaded or allocated at a first launch cannot be captured
                self._called.add(key)
                return launched()
            held = self._captured(launched)
            if held is None:
                self._graphs = False
                return launched()
            self._replays[key] = held
        held.graph.replay()
        return held.last

    def _all_but_last(self, part: slice, buffers: _Buffers, with_identity: Launch | None = None) -> Last:
        size, recipe = part.stop - part.start, self._planned.recipe
        x, y, work, tables = buffers
        return chains.all_but_last(
            recipe.form, self._planned.launches[size], x[part], y[part], chains.cut(work, size, max(self._sizes)),
            self._triples, recipe.restarts, tables, with_identity,
        )

    def _captured(self, launched: Callable[[], Last]) -> _Replay | None:
        """A graph of these launches, which it does not run; None, and one warning, where they cannot be captured."""
        graph, stream = torch.cuda.CUDAGraph(), self._workspace.capture_stream
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Other threads (a data loader's, NCCL's) may allocate meanwhile.
                graph.capture_begin(pool=self._workspace.pool, capture_error_mode="thread_local")
                try:
                    last = launched()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            logger.warning("%s runs without a CUDA graph: %s", self._planned.recipe.group.label(), error)
            return None
        return _Replay(graph, last, self._workspace.version)

    def _write(self, piece: _Piece, ends: Ends, out: Tensor, workspace: Workspace) -> None:
        """The last product of a piece into ``out``."""
        launch = (ends.direct if piece.direct else ends.last).get(piece.size)
        last = piece.last
        if launch is None:
            self._planned.endings[piece.size].launch(last.q, last.x, last.out, *last.scalars)
            out.copy_(last.out)
        elif writable(out):
            launch(last.q, last.x, out, *last.scalars)
        else:
            aligned = workspace.buffer("aligned", tuple(out.shape), out.dtype)
            launch(last.q, last.x, aligned, *last.scalars)
            out.copy_(aligned)

# mypy: ignore-errors
"""The products of a span in CuTe DSL: in which phase, from and to which squares, and the barrier between phases."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dmuon_tune.problem import Problem

from ._cutedsl_space import CHUNK
from ._cutedsl_span_space import SpanConfig, flight, members, squares
from ._cutedsl_symmetric import SymmetricProduct
from .gram_span import steps_of

Z, S, R, Q = range(4)  # squares of one matrix in ``work``; Q's is the first of two, which take turns


class SpanPhases(SymmetricProduct):
    """A step is three phases, the last one two: Z = cR² + bR; S = RZ + aR and Q ← QZ + aQ; R ← SZ + aS.

    In each phase blocks of the same matrix share the tiles of its products. A counter of the matrix in global memory
    counts tiles that are in memory; whoever loads for a phase waits until those of the phases before it are.
    """

    def __init__(self, problem: Problem, config: SpanConfig, sm_count: int) -> None:
        self.matrices, self.flight, self.steps = problem.batch, flight(problem, config), steps_of(problem)
        super().__init__(squares(problem, self.flight), config, sm_count * config.blocks_per_sm)
        self.members = members(problem, config, sm_count)
        self.phases = 3 * self.steps - 1 if self.steps > 1 else 1
        self.products = 4 * self.steps - 3
        # A tile is counted by each of its warpgroups in each block of a cluster.
        self.tile_count = self.tiles * config.warpgroups * config.cluster
        self.tile_cols = config.tile_n // CHUNK

    def _place(self):
        """(place in flight, which of the clusters there, rank in the cluster)."""
        cluster, rank = self._place_in_cluster()
        # Neighbours work on one matrix: in turn by number, 128×128 took 6 % longer at 32×512 and 12 % at 6×640.
        return cluster // self.members, cluster % self.members, rank

    @cute.jit
    def _k_order(self, col):
        """Where a tile's walk along k starts, and how many tiles along k at its end are C's: A's in the tile's columns.

        C is A in every product of a span; so the last stages of the ring hold it.
        """
        end = cutlass.min((col + 1) * self.tile_cols, Int32(self.k_tiles))
        return end, end - col * self.tile_cols

    @cute.jit
    def _products_of(self, phase):
        """How many products a phase has: Q's and S's from the second step on, but no S in the last step."""
        count = Int32(1)
        if phase % 3 == 1 and phase > 1 and phase < self.phases - 1:
            count = Int32(2)
        return count

    @cute.jit
    def _squares(self, phase, product):
        """(A's square, which is C's too, B's, D's, whether D is Q); R is the input before phase 2."""
        step, kind = phase // 3, phase % 3
        a, b, d, is_q = Int32(R), Int32(Z), Int32(Z), cutlass.Boolean(False)
        if kind == 0:
            b = Int32(R)
        if kind == 1:
            d = Int32(S)
            is_q = step > 0 and product == 0
            if is_q:
                a, d = Q + (step - 1) % 2, Q + step % 2
        if kind == 2:
            a, d = Int32(S), Int32(R)
        return a, b, d, is_q

    @cute.jit
    def _coefficients(self, coefficients, phase):
        """(α, β, γ) of a phase: of Z's product c, b and the a of its identity, of the others 1 and a."""
        step = phase // 3
        a = coefficients[step, 0]
        alpha, beta = cutlass.Float32(1.0), a
        if phase % 3 == 0:
            alpha, beta = coefficients[step, 2], coefficients[step, 1]
        return alpha, beta, a

    @cute.jit
    def _await(self, counter, due):
        """A warp that loads: what was counted is in memory, and TMA reads it."""
        counted = Int32(0)
        while counted < due:
            counted = cute.arch.load(counter.llvm_ptr, Int32, sem="acquire", scope="gpu")
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def _count(self, counter, place, done, thread):
        """A warpgroup's ``done`` tiles of a phase are in memory; who counts the last of all leaves the counter zero."""
        if thread % 128 // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()
            rounds = (self.matrices - place + self.flight - 1) // self.flight
            total = rounds * self.products * self.tile_count
            with cute.arch.elect_one():
                before = cute.arch.atomic_add(counter.llvm_ptr, done, sem="release", scope="gpu")
                if before + done == total:
                    cute.arch.store(counter.llvm_ptr, Int32(0))

# mypy: ignore-errors
"""Which tiles of the triangle, and which part of k, each block of the CuTe DSL symmetric product works on."""

from __future__ import annotations

from math import lcm

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dmuon_tune.problem import Problem

from ._cutedsl_epilogue import SymmetricEpilogue
from ._cutedsl_space import SymmetricConfig, rounds_of


class TileWalk(SymmetricEpilogue):
    """Clusters walk all tiles that touch the lower triangle; two warpgroups of a block may take them in turn.

    Blocks that may share a tile's k walk tiles of their own, and share those that are left for a last round.
    """

    def __init__(self, problem: Problem, config: SymmetricConfig, blocks: int) -> None:
        super().__init__(problem, config)
        self.k_tiles = -(-problem.k // config.tile_k)
        self.cluster, self.blocks_together = config.cluster, config.cluster * config.split
        self._plan_tiles(config.group)
        self.total = self.tiles * self.batch
        rounds, self.rest, self.clusters = rounds_of(self.total, blocks, config)
        self.whole, self.walkers = self.total - self.rest, self.clusters * config.split
        self.last_turn = rounds % 2  # which of two warpgroups taking turns has the last round's tile

    def _plan_tiles(self, group: int) -> None:
        """Rows of (a cluster's) tiles are walked in groups: a group's rectangle by columns, then its jagged end."""
        tile_m, tile_n = self.tile[0] * self.cluster, self.tile[1]
        period = lcm(tile_m, tile_n) // tile_m
        self.group = -(-group // period) * period
        self.group_cols = self.group * tile_m // tile_n
        self.rows = -(-self.m // tile_m)
        jagged = [-(-(row + 1) * tile_m // tile_n) for row in range(self.group)]
        self.jagged_starts = [sum(jagged[:row]) for row in range(self.group)]
        self.jagged_total = sum(jagged)
        cols = -(-self.m // tile_n)
        self.tiles = sum(min(-(-(row + 1) * tile_m // tile_n), cols) for row in range(self.rows))

    @cute.jit
    def _tile_of(self, index: Int32):
        """Linear index → (batch, tile row, tile column)."""
        batch = index // self.tiles
        rest = index - batch * self.tiles
        first_row = Int32(0)
        base = Int32(0)
        size = Int32(self.jagged_total)
        while rest >= size:
            rest -= size
            first_row += self.group
            base += self.group_cols
            size += self.group * self.group_cols
        rows = cutlass.min(Int32(self.group), self.rows - first_row)
        row = first_row
        col = Int32(0)
        if rest < rows * base:
            col = rest // rows
            row = first_row + (rest - col * rows)
        else:
            jagged = rest - rows * base
            start = Int32(0)
            for r in cutlass.range_constexpr(1, self.group):
                if jagged >= self.jagged_starts[r]:
                    row = first_row + r
                    start = Int32(self.jagged_starts[r])
            col = base + jagged - start
        return batch, row, col

    def _place_in_cluster(self):
        """(which cluster, rank among its blocks)."""
        block, _, _ = cute.arch.block_idx()
        return block // self.blocks_together, block % self.blocks_together

    def _shares(self):
        """Whether the cluster has a tile in the round that shares k."""
        return self._place_in_cluster()[0] < self.rest

    @cute.jit
    def _first_tile(self, group):
        """Where a block's walk starts, or that of the warpgroup where they take turns; it ends at ``total``."""
        index, rank = self._place_in_cluster()
        if cutlass.const_expr(self.split > 1 and self.whole > 0):
            index = index * self.split + rank
        if cutlass.const_expr(self.pingpong):
            if group == 1:
                index = self._next_tile(index)
        return index

    @cute.jit
    def _next_tile(self, index):
        after = index + self.walkers
        if cutlass.const_expr(self.split > 1):
            if after >= self.whole:
                cluster, _ = self._place_in_cluster()
                after = self.whole + cluster if index < self.whole else self.total + cluster
        return after

    @cute.jit
    def _block_tile(self, index, rank):
        """The tile of one block of a cluster: (batch, tile row, tile column)."""
        batch, row, col = self._tile_of(index)
        if cutlass.const_expr(self.cluster > 1):
            row = row * self.cluster + rank
        return batch, row, col

    @cute.jit
    def _k_range(self, index, rank):
        """First tile along k, and how many, of a block: all, or its share."""
        first, count = Int32(0), Int32(self.k_tiles)
        if cutlass.const_expr(self.split > 1):
            if index >= self.whole:
                first = rank * self.k_tiles // self.split
                count = (rank + 1) * self.k_tiles // self.split - first
        return first, count

    @cute.jit
    def _own_next(self, index):
        """The next tile of the same warpgroup."""
        after = self._next_tile(index)
        if cutlass.const_expr(self.pingpong):
            after = self._next_tile(after)
        return after

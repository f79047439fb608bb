# mypy: ignore-errors
"""Between the blocks of the CuTe DSL kernel of whole recurrences, and between its registers and shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32

from dmuon_tune.problem import Problem

from . import _cutedsl_polar_ops as ops
from ._cutedsl_polar_memory import PANEL, PANEL_BYTES, PolarMemory
from ._cutedsl_polar_space import CHUNK, HALF, POLAR_THREADS, PolarConfig

CHUNK_BYTES = HALF * CHUNK * 2
GROUP_BYTES = 64 * PANEL * 2  # of one panel, what one warpgroup's rows occupy: contiguous
WORDS = CHUNK // 16 * 4  # registers of 64 rows × 128 columns in fp16
PART = 32  # accumulators of a thread that one panel of XXᵀ takes
PART_BYTES = PART * 2 * POLAR_THREADS  # in fp16


class PolarExchange(PolarMemory):
    """What blocks of a cluster send each other, each message counted on a barrier of the receiver.

    Barriers: X's rows of the other half; XXᵀ's other square; with column groups also the parts of the sum XXᵀ, and the
    sum's own rows. Each completes once a step.
    """

    def __init__(self, problem: Problem, config: PolarConfig) -> None:
        super().__init__(problem, config)
        self.parts = 2 * self.halves // self.groups  # panels of XXᵀ's own rows that a block sums

    @cute.jit
    def _share(self, mine, theirs, first_panel, panels: cutlass.Constexpr[int], barrier, rank, group, chosen):
        """Send panels of the warpgroup's own rows, which its threads wrote and fenced, to the other half's block."""
        if cutlass.const_expr(self.halves == 2):
            done = cute.arch.map_dsmem_ptr(barrier, rank ^ 1).toint()
            target = cute.arch.map_dsmem_ptr(theirs.iterator, rank ^ 1).toint()
            for panel in cutlass.range_constexpr(panels):
                offset = (first_panel + panel) * PANEL_BYTES + group * GROUP_BYTES
                ops.send(target + offset, mine.iterator.toint() + offset, Int32(GROUP_BYTES), done, chosen)

    @cute.jit
    def _written(self):
        """Before a barrier: what this thread wrote may be read by wgmma and bulk copies after it."""
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def _group_barrier(self, group):
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)

    @cute.jit
    def _expect(self, barriers, thread):
        """Set the barriers up for what comes next, once this thread has waited for what came before."""
        if cutlass.const_expr(self.blocks > 1):
            chosen, two, sums = Int32(thread == 0), self.halves - 1, self.groups - 1
            sizes = (
                two * HALF * self.cols * 2,
                two * 2 * PANEL_BYTES,
                sums * self.parts * PART_BYTES,
                min(sums, 1) * (2 * self.halves - self.parts) * PANEL_BYTES,
            )
            for i in cutlass.range_constexpr(len(sizes)):
                if cutlass.const_expr(sizes[i] > 0):
                    ops.expect((barriers + i).toint(), Int32(sizes[i]), chosen)

    @cute.jit
    def _part(self, acc, first_panel, sums, squares, barriers, rank, thread):
        """The own part of two panels' sums over the column groups, to the blocks that sum them up, rounded to fp16."""
        half, columns = rank % self.halves, rank // self.halves
        for panel in cutlass.range_constexpr(first_panel, first_panel + 2):
            begin = panel % 2 * PART
            summer, part = panel // self.parts, panel % self.parts
            here, away = Int32(columns == summer), Int32(columns != summer)
            to = half + self.halves * summer
            slot = columns - Int32(columns > summer)
            place = (slot * self.parts + part) * PART_BYTES + thread * 16
            target = cute.arch.map_dsmem_ptr(squares.iterator, to).toint() + place
            done = cute.arch.map_dsmem_ptr(barriers + 2, to).toint()
            for i in cutlass.range_constexpr(0, PART, 8):
                four = tuple(ops.pack(acc[begin + i + e], acc[begin + i + e + 1]) for e in range(0, 8, 2))
                ops.send_words(target + i * 2 * POLAR_THREADS, *four, done, away)
            for i in cutlass.range_constexpr(PART):
                sums[i, part] = ops.select(here, acc[begin + i], sums[i, part])

    @cute.jit
    def _sum(self, sums, squares, other, barriers, phase, rank, group, leader, places, thread):
        """The own rows of XXᵀ in shared memory, summed over the column groups.

        A panel of 64 columns is summed by one of the groups, in one order, and sent to all who need it: the blocks of
        these rows, and of the own square also those of the other half.
        """
        columns = rank // self.halves
        base = squares.iterator.toint()
        cute.arch.mbarrier_wait(barriers + 2, phase)
        for slot in cutlass.range_constexpr(self.groups - 1):
            for part in cutlass.range_constexpr(self.parts):
                place = base + (slot * self.parts + part) * PART_BYTES + thread * 16
                for i in cutlass.range_constexpr(0, PART, 8):
                    words = ops.load_words(place + i * 2 * POLAR_THREADS)
                    for e in cutlass.range_constexpr(4):
                        low, high = ops.unpack(words[e])
                        sums[i + 2 * e, part] = sums[i + 2 * e, part] + low
                        sums[i + 2 * e + 1, part] = sums[i + 2 * e + 1, part] + high
        # The parts lay where XXᵀ goes: all are read, so it may come.
        self._arrive()
        self._wait()
        for part in cutlass.range_constexpr(self.parts):
            panel = columns * self.parts + part
            for block in cutlass.range_constexpr(4):
                at = base + panel * PANEL_BYTES + places[block]
                ops.store_squares(
                    at, *(ops.pack(sums[8 * block + 2 * i, part], sums[8 * block + 2 * i + 1, part]) for i in range(4))
                )
        self._written()
        self._group_barrier(group)
        for part in cutlass.range_constexpr(self.parts):
            panel = columns * self.parts + part
            offset = panel * PANEL_BYTES + group * GROUP_BYTES
            for away in cutlass.range_constexpr(1, self.groups):
                to = (rank + away * self.halves) % self.blocks
                self._send_panel(squares, squares, offset, to, barriers + 3, leader)
        if cutlass.const_expr(self.halves == 2):
            for part in cutlass.range_constexpr(self.parts):
                panel = columns * self.parts + part
                offset = panel * PANEL_BYTES + group * GROUP_BYTES
                of_square = leader * Int32(panel < 2)
                for away in cutlass.range_constexpr(self.groups):
                    to = ((rank ^ 1) + away * self.halves) % self.blocks
                    self._send_panel(other, squares, offset, to, barriers + 1, of_square)
        cute.arch.mbarrier_wait(barriers + 3, phase)

    @cute.jit
    def _send_panel(self, theirs, mine, offset, to, barrier, chosen):
        target = cute.arch.map_dsmem_ptr(theirs.iterator, to).toint() + offset
        done = cute.arch.map_dsmem_ptr(barrier, to).toint()
        ops.send(target, mine.iterator.toint() + offset, Int32(GROUP_BYTES), done, chosen)

    @cute.jit
    def _arrive(self):
        """This block's reads of X and XXᵀ are done: others may write there once they have waited for it."""
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def _wait(self):
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def _operand_registers(self):
        """Room for 64 rows × 128 columns as wgmma wants an A operand, and the same as 32-bit words.

        Word by word it lies as an accumulator does. Kept in words: apart, its halves would take a register each.
        """
        operand = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, CHUNK // 16)), Float16)
        return operand, self._words(operand)

    @cute.jit
    def _words(self, operand):
        return cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Int32), cute.make_layout(WORDS))

    @cute.jit
    def _rounded(self, acc):
        """fp16 copy of an accumulator."""
        operand, words = self._operand_registers()
        for i in cutlass.range_constexpr(WORDS):
            words[i] = ops.pack(acc[2 * i], acc[2 * i + 1])
        return operand

    @cute.jit
    def _places(self, thread):
        """A lane's line of the squares that the warp moves at once, at each quarter of a panel: byte offsets.

        A warp holds 16 rows. Its registers are, for every 16 columns, the squares (upper, left), (lower, left),
        (upper, right), (lower, right), and an address belongs to one line of one of them. The 16-byte parts of a
        panel's line are stored at their number xor the row's last three bits.
        """
        lane = thread % 32
        line = lane % 8
        row = thread // 32 * 16 + lane // 8 % 2 * 8 + line
        part = (lane // 16) ^ line
        return tuple(row * (PANEL * 2) + (part ^ (2 * quarter)) * 16 for quarter in range(4))

    @cute.jit
    def _keep(self, operand, address, places):
        """An A operand in registers to the own rows of 128 columns in shared memory."""
        words = self._words(operand)
        for block in cutlass.range_constexpr(CHUNK // 16):
            at = address + places[block % 4] + block // 4 * PANEL_BYTES
            ops.store_squares(at, *(words[4 * block + i] for i in range(4)))

    @cute.jit
    def _recall(self, acc, a, address, places):
        """acc ← a · what ``_keep`` stored there."""
        for block in cutlass.range_constexpr(CHUNK // 16):
            found = ops.load_squares(address + places[block % 4] + block // 4 * PANEL_BYTES)
            for i in cutlass.range_constexpr(4):
                low, high = ops.unpack(found[i])
                acc[8 * block + 2 * i] = a * low
                acc[8 * block + 2 * i + 1] = a * high

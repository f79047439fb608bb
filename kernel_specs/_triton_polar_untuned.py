"""Which configuration of the Triton kernel of whole recurrences suits a problem before anything was measured."""

from __future__ import annotations

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem

from ._triton_polar_space import PolarConfig, illegality, padded

LEAST_SHARE = 512  # columns of a matrix for which another block is worth the waits


def heuristic(problem: Problem, device: DeviceFingerprint) -> PolarConfig:
    """What was fastest on an H200: all in registers where X fits; else wide blocks, shared where rows are long."""
    block_m, whole = padded(problem.m), padded(problem.n)
    if whole <= 2 * block_m:
        for warps in (4, 8) if block_m >= 64 else (1, 2, 4):  # from 64 rows on four warps multiply together
            plain = PolarConfig("plain", whole, warps, 1)
            if illegality(problem, plain, device) is None:
                return plain
    if block_m < 64:
        return PolarConfig("gram", min(whole, 64), {16: 1, 32: 2}[block_m], 2)
    fitting = [b for b in (16, 8, 4, 2) if b * problem.batch <= device.sm_count and b * LEAST_SHARE <= problem.n]
    return PolarConfig("gram", min(whole, 128), 8, 1 if block_m == 128 else 2, next(iter(fitting), 1))

"""Which configuration of the Triton ``momentum`` suits a problem before anything was measured."""

from __future__ import annotations

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import ITEM_BYTES, Problem

from ._triton_momentum_space import MomentumConfig


def heuristic(problem: Problem, device: DeviceFingerprint) -> MomentumConfig:
    """Few elements a thread, so that all programs run at once; of 16-bit momentum twice as many, whose two or three
    streams else move too little at a time (H200, 2026-11-29)."""
    wide = problem.epilogue != "none" and ITEM_BYTES[problem.dtype] == 2
    return MomentumConfig(block=2048 if wide else 1024)

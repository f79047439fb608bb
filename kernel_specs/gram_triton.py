"""``gram`` in Triton: the lower tiles of XXᵀ, mirrored as they are stored."""

from __future__ import annotations

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from . import _triton_tiles
from ._triton_symmetric import SOURCES, build
from ._triton_tiles import TileConfig, symmetric_shape
from ._triton_untuned import heuristic


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    return _triton_tiles.refusal(problem, device, symmetric_shape(problem), ("none",))


def illegality(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> str | None:
    return _triton_tiles.illegality(problem, config, device, symmetric_shape(problem))


KERNEL = KernelSpec("gram", "triton", TileConfig, refusal, build, (__name__, *SOURCES), illegality, heuristic)

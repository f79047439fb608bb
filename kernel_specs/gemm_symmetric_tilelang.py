"""``gemm_symmetric`` in TileLang: the lower tiles of αABᵀ + βC + γI, mirrored as they are stored."""

from __future__ import annotations

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import EPILOGUES, Problem
from dmuon_tune.spec import KernelSpec

from . import _tilelang, _tilelang_symmetric
from ._tilelang import TileConfig, symmetric_shape
from ._tilelang_untuned import heuristic


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    return _tilelang.refusal(problem, device, symmetric_shape(problem), EPILOGUES)


def illegality(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> str | None:
    return _tilelang.illegality(problem, config, device, symmetric_shape(problem))


KERNEL = KernelSpec(
    "gemm_symmetric", "tilelang", TileConfig, refusal, _tilelang_symmetric.build,
    (__name__, _tilelang.__name__, _tilelang_symmetric.__name__), illegality, heuristic,
)

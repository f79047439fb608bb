"""Which configuration of the CuTe DSL kernel of whole recurrences suits a problem before anything was measured."""

from __future__ import annotations

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem

from ._cutedsl_polar_space import PolarConfig, illegality


def heuristic(problem: Problem, device: DeviceFingerprint) -> PolarConfig:
    """As few blocks a matrix as hold it: every further one adds an exchange. Two a multiprocessor where they fill it.

    256×128×128 took 30.0 µs with two, 33.7 µs with one (H200, 2026-11-29).
    """
    candidates = (PolarConfig(groups, resident) for groups in (1, 2, 4) for resident in (2, 1))
    return next(config for config in candidates if illegality(problem, config, device) is None)

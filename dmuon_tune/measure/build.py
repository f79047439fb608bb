"""From a kernel, a problem and a configuration to a callable, and to the key its results are kept under."""

from __future__ import annotations

from typing import Any

from dmuon_tune.backends import CompiledKernel, backends, load
from dmuon_tune.cache.key import TuningKey
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec


def compile_kernel(spec: KernelSpec, problem: Problem, config: Any, device: DeviceFingerprint) -> CompiledKernel:
    """Compile one configuration for the current device; raises whatever its DSL raises."""
    load(spec.backend)
    return backends()[spec.backend].compile(spec.build(problem, config, device), problem, device)


def tuning_key(spec: KernelSpec, problem: Problem, device: DeviceFingerprint) -> TuningKey:
    """The key of this kernel's results for a problem: its code, this device and this backend's toolchain."""
    return TuningKey(problem, spec.name, spec.digest(), device, backends()[spec.backend].toolchain(device))

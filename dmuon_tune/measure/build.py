"""From a kernel, a problem and a configuration to a callable or an artefact, and to the key of its results."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from dmuon_tune.backends import CompiledKernel, backends, load, load_portable, portable
from dmuon_tune.cache.artefacts import Artefact, ArtefactError, ArtefactStore
from dmuon_tune.cache.key import TuningKey
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.portable import PortableCode, UnloadableCodeError
from dmuon_tune.problem import Problem
from dmuon_tune.space import config_from_dict, config_json
from dmuon_tune.spec import KernelSpec

from .verify import VALIDATION

# Kernels that a process keeps: for races; for chains, most of which differ in one product; for a next optimizer.
COMPILED = 128


def compile_kernel(spec: KernelSpec, problem: Problem, config: Any, device: DeviceFingerprint) -> CompiledKernel:
    """Compile one configuration for the current device; raises ValueError where it is illegal,
    else whatever its DSL raises."""
    _check_legal(spec, problem, config, device)
    load(spec.backend)
    return backends()[spec.backend].compile(spec.build(problem, config, device), problem, device)


def compile_portable(spec: KernelSpec, problem: Problem, config: Any, device: DeviceFingerprint) -> PortableCode:
    """Compile one configuration for a GPU of ``device``'s architecture, which need not be here, or for this CPU; raises
    ValueError where it is illegal, NotPortableError, or whatever its DSL raises."""
    _check_legal(spec, problem, config, device)
    load(spec.backend)
    program = spec.build(problem, config, device)
    return portable(spec.backend, program, problem, device, ops()[problem.op].arguments(problem))


def _check_legal(spec: KernelSpec, problem: Problem, config: Any, device: DeviceFingerprint) -> None:
    """A cache can name what no search would: a kernel may compile it, to code that is wrong."""
    reason = spec.illegality(problem, config, device)
    if reason:
        raise ValueError(f"{spec.name} is not compiled for {problem.label()} as {config_json(config)}: {reason}")


def load_artefact(store: ArtefactStore, artefact: Artefact) -> CompiledKernel:
    """The callable of compiled code, without its DSL; ArtefactError where the code is damaged or cannot run here."""
    code = PortableCode(artefact.format, store.read(artefact), artefact.launch)
    try:
        return CompiledKernel(load_portable(code, store.files(artefact)[0]))
    except UnloadableCodeError as error:
        whose = f"the artefact of {artefact.label()} in {store.folder}"
        raise ArtefactError(f"{whose} cannot run here: {error}{store.advice}") from error


def compiled_kernel(spec: KernelSpec, problem: Problem, config: Any, device: DeviceFingerprint) -> CompiledKernel:
    """What :func:`compile_kernel` makes, from memory where this process has made it for the same device before."""
    index = torch.cuda.current_device() if device.kind == "cuda" else None
    return _compiled(spec, problem, config_json(config), device, index)


def compile_once(name: str, problem: Problem, config: dict[str, Any], device: DeviceFingerprint) -> CompiledKernel:
    """The same by the kernel's name and the configuration's fields."""
    spec = kernel(name)
    return compiled_kernel(spec, problem, config_from_dict(spec.Config, config), device)


@lru_cache(COMPILED)
def _compiled(
    spec: KernelSpec, problem: Problem, config: str, device: DeviceFingerprint, index: int | None
) -> CompiledKernel:
    return compile_kernel(spec, problem, config_from_dict(spec.Config, json.loads(config)), device)


def tuning_key(spec: KernelSpec, problem: Problem, device: DeviceFingerprint) -> TuningKey:
    """The key of this kernel's results for a problem: its code, this device, this backend's toolchain and checks."""
    toolchain = backends()[spec.backend].toolchain(device)
    return TuningKey(problem, spec.name, spec.digest(), device, toolchain, VALIDATION)


def is_of_todays_code(key: TuningKey, spec: KernelSpec) -> bool:
    """Whether a kept result is of this kernel's source and of today's checks, by whatever toolchain."""
    return (key.kernel, key.spec_digest, key.validation) == (spec.name, spec.digest(), VALIDATION)

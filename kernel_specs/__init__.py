"""Finds every op and kernel: one file each in this folder, no central list."""

from __future__ import annotations

import importlib
import os
import pkgutil
from functools import cache
from types import ModuleType

from dmuon_tune.errors import UsageError
from dmuon_tune.spec import KernelSpec, OpSpec

if __name__ == "kernel_specs":
    raise ImportError("import dmuon_tune.kernel_specs, not kernel_specs")

EXTRA_MODULES_VARIABLE = "DMUON_TUNE_KERNEL_MODULES"


@cache
def _modules() -> tuple[ModuleType, ...]:
    names = [
        f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    ]
    names += [name for name in os.environ.get(EXTRA_MODULES_VARIABLE, "").split(",") if name]
    try:
        return tuple(importlib.import_module(name) for name in sorted(names))
    except ModuleNotFoundError as error:
        raise UsageError(f"kernel module {error.name!r} not found; check {EXTRA_MODULES_VARIABLE}") from error


def ops() -> dict[str, OpSpec]:
    """Every op by name."""
    return {module.OP.name: module.OP for module in _modules() if hasattr(module, "OP")}


def kernels(op: str | None = None) -> list[KernelSpec]:
    """Every kernel, or those of one op, in name order: this folder's and those of ``DMUON_TUNE_KERNEL_MODULES``."""
    found = [module.KERNEL for module in _modules() if hasattr(module, "KERNEL")]
    return sorted((spec for spec in found if op in (None, spec.op)), key=lambda spec: spec.name)


def kernel(name: str) -> KernelSpec:
    """The kernel of this name (``op.backend``); UsageError lists the names where there is none."""
    by_name = {spec.name: spec for spec in kernels()}
    if name not in by_name:
        raise UsageError(f"no kernel named {name!r}; there are: {', '.join(sorted(by_name))}")
    return by_name[name]

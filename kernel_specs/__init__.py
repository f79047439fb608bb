"""Finds every op and kernel: one file each in this folder, no central list."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import reprlib
from functools import cache
from types import ModuleType
from typing import Any

from dmuon_tune import space
from dmuon_tune.errors import UsageError, said
from dmuon_tune.spec import KernelSpec, OpSpec

if __name__ == "kernel_specs":
    raise ImportError("import dmuon_tune.kernel_specs, not kernel_specs")

EXTRA_MODULES_VARIABLE = "DMUON_TUNE_KERNEL_MODULES"


@cache
def _modules() -> tuple[ModuleType, ...]:
    own = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    named = [name.strip() for name in os.environ.get(EXTRA_MODULES_VARIABLE, "").split(",")]
    extra = [name for name in dict.fromkeys(named) if name and name not in own]
    modules = [importlib.import_module(name) for name in sorted(own)]
    modules += [_import_extra(name) for name in sorted(extra)]
    for module in modules[len(own):]:
        _check_extra(module, modules)
    return tuple(modules)


def _import_extra(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{EXTRA_MODULES_VARIABLE}: module {name!r} cannot be imported: {said(error)}") from error


def _check_extra(module: ModuleType, modules: list[ModuleType]) -> None:
    """UsageError where a module of the user's exports no valid KERNEL or OP, or one whose name is taken."""
    where = f"{EXTRA_MODULES_VARIABLE}: module {module.__name__!r}"
    exported = {name: vars(module)[name] for name in ("KERNEL", "OP") if name in vars(module)}
    if not exported:
        raise UsageError(f"{where} has neither KERNEL nor OP; export one (CONTRIBUTING.md shows how)")
    for export, spec in exported.items():
        kind = KernelSpec if export == "KERNEL" else OpSpec
        if not isinstance(spec, kind):
            raise UsageError(f"{where}: {export} must be {kind.__name__}, not {type(spec).__name__}")
        wrong = _wrong_field(spec)
        if wrong is not None:
            raise UsageError(f"{where}: {export}: {wrong}")
        for other in modules:
            rival = vars(other).get(export)
            if other is not module and isinstance(rival, kind) and rival.name == spec.name:
                raise UsageError(
                    f"{where}: {export} is named {spec.name!r}, as that of module {other.__name__!r} is; "
                    f"{'give it another variant' if export == 'KERNEL' else 'rename it'}"
                )
    kernel_spec = exported.get("KERNEL")
    known = sorted(other.OP.name for other in modules if isinstance(vars(other).get("OP"), OpSpec))
    if kernel_spec is not None and kernel_spec.op not in known:
        raise UsageError(f"{where}: KERNEL is of the unknown op {kernel_spec.op!r}; there are: {', '.join(known)}")


_CALLABLES = ("refusal", "build", "illegality", "arguments", "reference", "make_inputs", "flops", "bytes_moved")


def _wrong_field(spec: KernelSpec | OpSpec) -> str | None:
    """Which field of a spec has not the type that its dataclass declares, in words; None where all have."""
    fields: dict[str, Any] = vars(spec)
    for name in ("op", "backend", "variant", "name", "summary"):
        if name in fields and not isinstance(fields[name], str):
            return f"{name} must be a string, not {type(fields[name]).__name__}"
    for name in _CALLABLES:
        if name in fields and not callable(fields[name]):
            return f"{name} must be callable, not {type(fields[name]).__name__}"
    if isinstance(spec, OpSpec):
        return None
    for name in ("heuristic", "seeds"):
        if fields[name] is not None and not callable(fields[name]):
            return f"{name} must be callable, not {type(fields[name]).__name__}"
    if not (isinstance(fields["Config"], type) and dataclasses.is_dataclass(spec.Config)):
        return "Config must be a dataclass"
    try:
        hash(spec.Config()), space.config_json(spec.Config())
    except (Exception, SystemExit) as error:
        return f"Config must be frozen, with a default of JSON's types for each field: {said(error)}"
    if not isinstance(fields["sources"], tuple) or not spec.sources:
        return "sources must be a tuple of module names"
    try:
        spec.digest()
    except (Exception, SystemExit) as error:
        return f"sources {reprlib.repr(spec.sources)} cannot be read: {said(error)}"
    return None


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

"""One file per DSL: whether it can run here, its toolchain, and how its program becomes a callable."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.problem import Problem


@dataclass(frozen=True)
class CompiledKernel:
    """A callable with the op's argument order, and what the compiler said of it.

    ``resources`` may hold ``registers`` (a thread), ``spill_bytes``, ``smem_bytes`` (a block) and ``compile_s``.
    """

    launch: Callable[..., Any]
    resources: dict[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """What a file of this folder exports as ``BACKEND``.

    ``unavailable`` says why this DSL cannot run on a device, and what to install, or None; it imports nothing heavy.
    ``toolchain`` raises ModuleNotFoundError where the DSL is not installed. ``compile`` raises whatever the DSL raises.
    A ``load`` without parameters, where there is one, imports the DSL and raises whatever that raises. A true ``peer``,
    where there is one, says that its kernels are another project's, whose absence is not worth a warning.
    """

    name: str

    def unavailable(self, device: DeviceFingerprint) -> str | None: ...

    def toolchain(self, device: DeviceFingerprint) -> Toolchain: ...

    def compile(self, program: Any, problem: Problem, device: DeviceFingerprint) -> CompiledKernel: ...


def load(name: str) -> None:
    """Import this backend's DSL, which must happen before a program is built; raises whatever that raises."""
    backend = backends()[name]
    if hasattr(backend, "load"):
        backend.load()


@cache
def backends() -> dict[str, Backend]:
    """Every backend by name: one file each in this folder, no central list."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        if hasattr(loaded, "BACKEND"):
            found[loaded.BACKEND.name] = loaded.BACKEND
    return found


def is_peer(name: str) -> bool:
    """Whether the backend of this name holds another project's kernels."""
    return bool(getattr(backends().get(name), "peer", False))

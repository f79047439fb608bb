"""One file per DSL: whether it can run here, its toolchain, and how its program becomes a callable."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
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


IMPORT_TIMEOUT_S = 120.0
IMPORT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dmuon_tune.backends import backends; backends()[sys.argv[2]].load()"
)


def load(name: str) -> None:
    """Import this backend's DSL, which must happen before a program is built; raises whatever that raises."""
    backend = backends()[name]
    if hasattr(backend, "load"):
        backend.load()


@cache
def import_failure(name: str) -> str | None:
    """Why this backend's DSL, though installed, does not import, or None; tried once, in a process of its own."""
    if not hasattr(backends()[name], "load"):
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", IMPORT, json.dumps(sys.path), name],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"{name} is installed, but importing it takes more than {IMPORT_TIMEOUT_S:.0f} s; reinstall it"
    if done.returncode == 0:
        return None
    last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return f"{name} is installed, but importing it fails: {last[0]}; reinstall it"


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

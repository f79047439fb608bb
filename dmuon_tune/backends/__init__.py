"""One file per DSL: whether it can run here, its toolchain, and how its program becomes a callable."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.portable import NotPortableError, PortableCode, UnloadableCodeError
from dmuon_tune.problem import Problem
from dmuon_tune.spec import Argument


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
    where there is one, says that its kernels are another project's, whose absence is not worth a warning. A
    ``portable(program, problem, device, arguments)``, where there is one, compiles to :class:`PortableCode` for
    ``device.arch``, which need not be here; ``arguments`` are the op's.
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


class Format(Protocol):
    """What a file of this folder exports as ``FORMAT``: loads one kind of portable code, without any DSL or compiler.

    ``load(data, launch, path)`` returns a callable with the op's argument order; ``path`` is the file that ``data`` was
    read from. UnloadableCodeError where this machine cannot run it.
    """

    name: str

    def load(self, data: bytes, launch: dict[str, Any], path: Path) -> Callable[..., Any]: ...


@cache
def backends() -> dict[str, Backend]:
    """Every backend by name: one file each in this folder, no central list."""
    return {backend.name: backend for backend in _exported("BACKEND")}


@cache
def formats() -> dict[str, Format]:
    """Every format of portable code by name, found as backends are."""
    return {each.name: each for each in _exported("FORMAT")}


def _exported(name: str) -> list[Any]:
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return [vars(module)[name] for module in modules if name in vars(module)]


@cache
def installed_version(distribution: str) -> str:
    """A package's version, looked for once; PackageNotFoundError, a ModuleNotFoundError, where it is not installed."""
    return importlib.metadata.version(distribution)


def makes_portable(name: str) -> bool:
    """Whether the backend of this name compiles to portable code."""
    return hasattr(backends().get(name), "portable")


def portable(
    name: str, program: Any, problem: Problem, device: DeviceFingerprint, arguments: tuple[Argument, ...]
) -> PortableCode:
    """A program of this backend as portable code; NotPortableError, or whatever its DSL raises."""
    backend: Any = backends()[name]
    if not makes_portable(name):
        raise NotPortableError(f"{name} kernels compile to no portable code")
    code: PortableCode = backend.portable(program, problem, device, arguments)
    return code


def load_portable(code: PortableCode, path: Path) -> Callable[..., Any]:
    """The callable of portable code, read from ``path``; UnloadableCodeError where it cannot run here."""
    if code.format not in formats():
        raise UnloadableCodeError(f"its format {code.format!r} is none of {', '.join(sorted(formats()))}")
    return formats()[code.format].load(code.data, code.launch, path)


def is_peer(name: str) -> bool:
    """Whether the backend of this name holds another project's kernels."""
    return bool(getattr(backends().get(name), "peer", False))

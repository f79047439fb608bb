"""PortableCode: one compiled kernel as bytes and launch metadata, which another machine loads without a compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PortableCode:
    """``format`` names who loads it (a module of ``dmuon_tune/backends``), ``data`` is the compiled code, ``launch``
    (JSON types) all that a launch needs besides: names, arguments, geometry."""

    format: str
    data: bytes
    launch: dict[str, Any]


class NotPortableError(RuntimeError):
    """Why this kernel, as it compiled, cannot be kept as portable code."""


class UnloadableCodeError(RuntimeError):
    """Why portable code cannot run on this machine."""

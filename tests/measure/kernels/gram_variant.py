"""A kernel of ``gram`` that misbehaves in one way: what the modules beside this one are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec


@dataclass(frozen=True)
class OneConfig:
    """No axes: a single configuration."""


@dataclass(frozen=True)
class Repeated:
    """Several configurations that all misbehave in the same way."""

    place: int = choice(0, range(11))


def gram(x: Any, r: Any, alpha: float) -> None:
    r.copy_(alpha * (x.double() @ x.double().mT))


def serves_all(problem: Any, device: Any) -> None:
    return None


def variant(
    module: str, launch: Callable[..., None] | None = None, build: Callable[..., Any] | None = None,
    config: type = OneConfig,
) -> KernelSpec:
    """``gram.library.<module>``, whose program is ``launch`` unless ``build`` makes it."""
    program = build or (lambda *_: launch)
    return KernelSpec("gram", "library", config, serves_all, program, (module,), variant=module)

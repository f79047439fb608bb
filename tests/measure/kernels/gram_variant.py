"""A kernel of ``gram`` that misbehaves in one way: what the modules beside this one are made of."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

SCREENED_S = 50e-6


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


def late(module: str, fail: Callable[[], None]) -> KernelSpec:
    """Right, and in its screening SCREENED_S fast; where a window of its is timed in a race it does ``fail``."""

    def launch(x: Any, r: Any, alpha: float) -> None:
        timed_by = _callers()
        if "race.py" not in timed_by and "timing.py" in timed_by:
            end = time.perf_counter() + SCREENED_S
            while time.perf_counter() < end:
                pass
            return
        if "timing.py" in timed_by:
            fail()
        gram(x, r, alpha)

    return variant(module, launch)


def _callers() -> set[str]:
    frame, found = sys._getframe(), set()
    while frame := frame.f_back:  # type: ignore[assignment]
        found.add(frame.f_code.co_filename.rpartition("/")[2])
    return found

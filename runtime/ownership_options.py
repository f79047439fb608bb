"""How long owners are looked for, from which seed, and how much an owner may keep."""

from __future__ import annotations

from dataclasses import dataclass

from dmuon_tune import checks


@dataclass(frozen=True)
class OwnershipOptions:
    """Of the search for owners, as of ``dmuon-tune plan``: ``seconds`` for improvement (0: the longest first alone),
    its ``seed``, and the ``memory_bytes`` of momentum that one rank may own (None: no limit). UsageError for others."""

    seconds: float = 2.0
    seed: int = 0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        checks.number("ownership.seconds", self.seconds)
        checks.integer("ownership.seed", self.seed, least=0)
        if self.memory_bytes is not None:
            checks.integer("ownership.memory_bytes", self.memory_bytes)

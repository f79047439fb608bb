"""Training in which anything comes in any order: dedicated owners, early or not, and gathered ones move alike."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from dmuon_tune.runtime import Muon, clip_grad_norm_, no_sync

from ..distributed.world import Worlds
from .stack import LAYERS, clip_by_last_norm, dedicated, loss_of, scale_gradients
from .test_early import arriving

MAX_NORM, LENGTH = 0.05, 14


class Training:
    """Of one model, whose owners are ``early``, ``dedicated`` or ``gathered``: each method is what comes next."""

    def __init__(self, size: int, way: str, options: dict[str, Any]) -> None:
        self.way, self.size, self.drawn = way, size, 0
        self.model = dedicated(size, mode="gather" if way == "gathered" else "dedicated")
        self.optimizer = Muon(self.model, verbose=False, weight_decay=0.1, **options)
        self.saved: dict[str, Any] = {}

    @property
    def last(self) -> int:
        """A block, another one with each loss."""
        return self.drawn % LAYERS

    def loss(self) -> Tensor:
        self.drawn += 1
        return loss_of(self.model, self.drawn * self.size + distributed.get_rank())

    def backward(self) -> None:
        with self.optimizer.early_step() if self.way == "early" else contextlib.nullcontext():
            self.loss().backward()

    def moves(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain(self) -> None:
        self.backward()
        self.moves()

    def clipped_by_the_last_norm(self) -> None:
        if self.way == "early":
            with self.optimizer.early_step(MAX_NORM):
                self.loss().backward()
        else:
            self.loss().backward()
            clip_by_last_norm(self.optimizer, MAX_NORM)
        self.moves()

    def clipped(self) -> None:
        self.loss().backward()
        clip_grad_norm_(self.model, MAX_NORM)
        self.moves()

    def scaled(self) -> None:
        self.backward()
        scale_gradients(self.model.parameters(), 2.0)
        self.moves()

    def accumulated(self) -> None:
        with no_sync(self.model):
            self.loss().backward()
        self.plain()

    def added(self) -> None:
        self.loss().backward()
        self.plain()

    def evaluated(self) -> None:
        self.backward()
        with torch.no_grad():
            self.loss()
        self.model.reshard()
        self.moves()

    def without_a_block(self) -> None:
        self.model.runs = [place for place in range(LAYERS) if place != self.last]
        self.plain()
        self.model.runs = range(LAYERS)

    def without_a_block_on_one_rank(self) -> None:
        self.model.runs = range(LAYERS - (distributed.get_rank() == 0))
        self.plain()
        self.model.runs = range(LAYERS)

    def without_a_gradient(self) -> None:
        self.backward()
        self.model.blocks[self.last].weight.grad = None
        self.moves()

    def frozen(self) -> None:
        weight = self.model.blocks[self.last].weight
        weight.requires_grad_(False)
        self.plain()
        weight.requires_grad_(True)

    def at_another_rate(self) -> None:
        self.backward()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.7
        self.moves()

    def at_another_momentum(self) -> None:
        for group in self.optimizer.param_groups:
            if group["use_muon"]:
                group["momentum"] = 0.9 if group["momentum"] == 0.95 else 0.95
        self.plain()

    def twice(self) -> None:
        """By the same gradients."""
        self.backward()
        self.optimizer.step()
        self.moves()

    def dropped(self) -> None:
        self.backward()
        self.optimizer.zero_grad()
        self.plain()

    def saved_in_between(self) -> None:
        self.backward()
        # Copies, as of FSDP2's shards there is no other.
        self.saved = copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        self.moves()

    def loaded_in_between(self) -> None:
        self.backward()
        if self.saved:
            self.model.load_state_dict(self.saved["model"])
            self.optimizer.load_state_dict(self.saved["optimizer"])
            self.optimizer.zero_grad()
        self.plain()

    def weights(self) -> dict[str, Tensor]:
        return {name: value.full_tensor() for name, value in self.model.state_dict().items()}


EITHER = [
    Training.plain, Training.scaled, Training.accumulated, Training.added, Training.evaluated, Training.frozen,
    Training.without_a_block, Training.without_a_gradient, Training.at_another_rate, Training.at_another_momentum,
    Training.twice, Training.dropped, Training.saved_in_between, Training.loaded_in_between,
]
# Of gathered ones a norm is summed in another order, and FSDP2's shards need all ranks.
DEDICATED = [
    *EITHER, Training.clipped, Training.clipped_by_the_last_norm, Training.without_a_block_on_one_rank,
]


def compared(
    rank: int, size: int, seed: int, ways: tuple[str, str], steps: Sequence[Callable[[Training], None]]
) -> tuple[int, int]:
    """Matrices that the first way has begun early, and those undone."""
    order = random.Random(seed)
    options = {
        "bucket_bytes": order.choice([1, 2**28]), "skip_nonfinite": order.random() < 0.3,
        "momentum_form": order.choice(["accumulate", "ema"]), "cautious": order.random() < 0.3,
    }
    pair, done = [Training(size, way, options) for way in ways], list[str]()
    for step in [Training.plain, Training.plain, *order.choices(steps, k=LENGTH)]:
        done.append(step.__name__)
        for each in pair:
            waits = each.way != "gathered" and step is not Training.without_a_block_on_one_rank
            with arriving(each.model.blocks[0]) if waits else contextlib.nullcontext():
                step(each)
        some, others = (each.weights() for each in pair)
        for name, value in some.items():
            assert torch.equal(value, others[name]), f"{name} after {', '.join(done)}, with {options}"
    traffic = pair[0].optimizer.traffic
    assert traffic is not None
    return traffic.early_runs, traffic.undone_runs


def test_what_begins_early_changes_no_bit(worlds: Worlds) -> None:
    ways = ("early", "dedicated")
    counts = [count for seed in range(3) for count in worlds(2).run(compared, seed, ways, DEDICATED)]
    # Over all seeds: one whose matrices form a single batch begins it only where the last gradient comes late.
    begun, undone = map(sum, zip(*counts, strict=True))
    assert begun > undone > 0


@pytest.mark.parametrize("seed", range(3))
def test_dedicated_owners_move_as_gathered_ones(worlds: Worlds, seed: int) -> None:
    worlds(2).run(compared, seed, ("dedicated", "gathered"), EITHER)

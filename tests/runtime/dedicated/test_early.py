"""The step in the shadow of a backward: the same bits, begun before the backward's end, or undone without a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from dmuon_tune.errors import UsageError
from dmuon_tune.runtime import Muon, clip_grad_norm_, no_sync
from dmuon_tune.runtime.distributed.control import Control
from dmuon_tune.runtime.distributed.whole import whole_of

from ..distributed.layouts import OPTIONS, Toy, parallel, text
from ..distributed.layouts import loss_of as toy_loss_of
from ..distributed.world import Worlds
from .stack import Stack, clip_by_last_norm, dedicated, loss_of, scale_gradients
from .test_passes import Breaks, matrices

STEPS, UNLIKE = 4, 2  # steps, and the first of them, whose state is new
MAX_NORM = 0.05
Early = Callable[..., contextlib.AbstractContextManager[None]]
Way = Callable[[Stack, Muon, int, Early], None]


@contextlib.contextmanager
def arriving(block: nn.Module) -> Iterator[None]:
    """In a backward what has been sent for the blocks behind this one is there before its gradient is."""
    works, post = list[Any](), Control.post

    def posted(self: Control, start: Callable[[], Any], what: str) -> Any:
        work = post(self, start, what)
        if what.startswith("gradients of"):
            works.append(work)
        return work

    def wait(gradient: Tensor) -> None:
        distributed.barrier()
        while works:
            works.pop().wait()

    Control.post = posted  # type: ignore[method-assign]
    handle = block.weight.register_hook(wait)
    try:
        yield
    finally:
        Control.post = post  # type: ignore[method-assign]
        handle.remove()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """A rank that has no others waits for what it sends at once."""
    post = Control.post

    def posted(self: Control, start: Callable[[], Any], what: str) -> Any:
        work = post(self, start, what)
        work.wait()
        return work

    Control.post = posted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Control.post = post  # type: ignore[method-assign]


def state_of(model: nn.Module, optimizer: Muon) -> dict[str, Tensor]:
    """Weights and momenta as they lie here; no other rank is asked."""
    found = {name: whole_of(p).weight.clone() for name, p in matrices(model).items()}
    for name, p in matrices(model).items():
        found |= {f"{name}, {block}": each.clone() for block, each in optimizer.state[p].get("owned", {}).items()}
    return found


def assert_same(these: dict[str, Tensor], those: dict[str, Tensor]) -> None:
    assert these.keys() == those.keys()
    for name, value in these.items():
        assert torch.equal(value, those[name]), name


def run(size: int, way: Way, early: bool, options: dict[str, Any]) -> tuple[Stack, Muon]:
    model = dedicated(size)
    # Each matrix alone, so that those of the last blocks need not wait for the first.
    optimizer = Muon(model, verbose=False, weight_decay=0.1, bucket_bytes=1, **options)
    with arriving(model.blocks[0]):
        for step in range(STEPS):
            seed = step * size + distributed.get_rank()
            way(model, optimizer, seed, optimizer.early_step if early else contextlib.nullcontext)
            optimizer.zero_grad()
    return model, optimizer


def compared(rank: int, size: int, way: Way, options: dict[str, Any]) -> tuple[int, int, int]:
    """Matrices that this rank owns and that arrive before the last one's gradient; those begun, those undone."""
    plain = state_of(*run(size, way, False, options))
    model, optimizer = run(size, way, True, options)
    assert_same(state_of(model, optimizer), plain)
    assert optimizer.traffic is not None
    own = sum(whole_of(block.weight).is_here for block in model.blocks[1:])
    return own * (STEPS - UNLIKE), optimizer.traffic.early_runs, optimizer.traffic.undone_runs


def plainly(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    with early():
        loss_of(model, seed).backward()
    optimizer.step()


def inside(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    """The forward and the step stand in it too."""
    with early():
        loss_of(model, seed).backward()
        optimizer.step()


def in_no_sync(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    with no_sync(model):
        loss_of(model, seed + 100).backward()
    plainly(model, optimizer, seed, early)


def partly(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    """One block runs on some ranks only, one on none."""
    model.runs = [0, 1, 4] if seed % 2 else [0, 1, 2, 4]
    plainly(model, optimizer, seed, early)


def added(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    """Each backward brings its mean."""
    loss_of(model, seed + 100).backward()
    plainly(model, optimizer, seed, early)


def clipped_by_last(
    model: Stack, optimizer: Muon, seed: int, early: Early, change: Callable[[Stack], None] = lambda model: None
) -> None:
    """By ``early_step``, or by hand."""
    with contextlib.nullcontext() if early is contextlib.nullcontext else early(max_norm=MAX_NORM):
        loss_of(model, seed).backward()
        change(model)
    if early is contextlib.nullcontext:
        assert clip_by_last_norm(optimizer, MAX_NORM) < 1, "else nothing is clipped"
    optimizer.step()


@pytest.mark.parametrize(("size", "way", "options"), [
    (1, plainly, {}), (2, plainly, {}), (3, inside, {}), (2, in_no_sync, {"skip_nonfinite": True}),
    (1, clipped_by_last, {}), (2, clipped_by_last, {}),
    (2, plainly, {"cautious": True, "momentum_form": "ema", "lr": torch.tensor(0.03)}),
], ids=lambda each: getattr(each, "__name__", str(each)))
def test_bits_are_the_same_and_batches_begin_before_a_backward_ends(
    worlds: Worlds, size: int, way: Way, options: dict[str, Any]
) -> None:
    for arrived, begun, undone in worlds(size).run(compared, way, options):
        assert begun >= arrived and undone == 0
        assert arrived or size > 2


@pytest.mark.parametrize("way", [partly, added])
def test_what_is_not_known_to_be_whole_waits_for_the_step(worlds: Worlds, way: Way) -> None:
    found = worlds(2).run(compared, way, {})
    assert not any(undone for *_, undone in found)
    assert sum(begun for _, begun, _ in found) == (0 if way is added else STEPS - UNLIKE), "only what ran last of all"


def scaled(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    with early():
        loss_of(model, seed).backward()
    scale_gradients(matrices(model).values(), 0.5)
    optimizer.step()


def slower(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    with early():
        loss_of(model, seed).backward()
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    optimizer.step()


def looked(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    """Modules see the last step's weights, and checkpoints its momenta."""
    before = model.state_dict()["blocks.2.weight"].full_tensor()
    with early():
        loss_of(model, seed).backward()
    with torch.no_grad():
        loss_of(model, seed)
    assert model.state_dict()["blocks.2.weight"].full_tensor().equal(before)
    optimizer.state_dict()
    optimizer.step()


def again(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    """Two backwards in it."""
    with early():
        loss_of(model, seed).backward()
        loss_of(model, seed + 100).backward()
    optimizer.step()


def thrown_away(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    with early():
        loss_of(model, seed).backward()
    optimizer.zero_grad()
    loss_of(model, seed + 100).backward()
    optimizer.step()


@contextlib.contextmanager
def behind_embedding(model: Stack, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """``change`` of what the embedding returns, through which a backward goes last."""
    handle = model.embedding.register_forward_hook(lambda module, given, result: change(result))
    try:
        yield
    finally:
        handle.remove()


def infinite(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    """The embedding's gradient is not finite from the first step on that begins early."""

    def change(result: Tensor) -> None:
        if seed // distributed.get_world_size() >= UNLIKE:
            result.register_hook(lambda gradient: gradient * torch.inf)

    with behind_embedding(model, change):
        plainly(model, optimizer, seed, early)


def broken(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    """A backward breaks off once batches have begun; the next one does without them."""
    before = state_of(model, optimizer)
    with behind_embedding(model, Breaks.apply), pytest.raises(ZeroDivisionError), early():
        loss_of(model, seed).backward()
    assert_same(state_of(model, optimizer), before)
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def changed_before_clipping(model: Stack, optimizer: Muon, seed: int, early: Early) -> None:
    clipped_by_last(model, optimizer, seed, early, lambda model: scale_gradients(matrices(model).values(), 2.0))


@pytest.mark.parametrize(
    "way", [scaled, slower, looked, again, thrown_away, infinite, broken, changed_before_clipping]
)
def test_what_comes_in_between_undoes_what_has_begun(worlds: Worlds, way: Way) -> None:
    for arrived, begun, undone in worlds(2).run(compared, way, {"skip_nonfinite": way is infinite}):
        assert undone == begun >= arrived


def refused(rank: int, size: int) -> None:
    model = dedicated(size)
    optimizer = Muon(model, verbose=False)
    for _ in range(UNLIKE + 1):
        with optimizer.early_step():
            loss_of(model, rank).backward()
            with pytest.raises(UsageError, match="owners have begun the step by these gradients as they are"):
                clip_grad_norm_(model, 1.0)
        with pytest.raises(UsageError, match="run the backward without early_step"):
            clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, rank).backward()
    assert clip_grad_norm_(model, 1.0) > 0
    optimizer.step()


def test_clipping_is_refused_until_the_step(worlds: Worlds) -> None:
    worlds(2).run(refused)


def of_two(rank: int, size: int) -> None:
    """An optimizer of all blocks but one, which is early, and another of that one: either's step may come first."""
    found = []
    for early in (False, True):
        model = dedicated(size)
        mine, others = (Muon(some, verbose=False, bucket_bytes=1)
                        for some in (model.blocks[1:], [*model.blocks[0].parameters()]))
        for step in range(STEPS):
            with arriving(model.blocks[0]), mine.early_step() if early else contextlib.nullcontext():
                if early:
                    with pytest.raises(UsageError, match="another optimizer's is open"), others.early_step():
                        pass
                loss_of(model, step).backward()
            for optimizer in (others, mine) if step % 2 else (mine, others):
                optimizer.step()
            model.zero_grad()
        found.append(state_of(model, mine))
    assert_same(*found)
    own = sum(whole_of(block.weight).is_here for block in model.blocks[1:])
    assert mine.traffic is not None and mine.traffic.undone_runs >= own, "where the other's step came first"
    assert mine.traffic.early_runs - mine.traffic.undone_runs == own, "where its own did"


def test_of_two_optimizers_one_is_early(worlds: Worlds) -> None:
    worlds(2).run(of_two)


def toys(rank: int, size: int, layout: str, bucket_bytes: int) -> None:
    """Splits, experts and biases."""
    found = []
    for make in (contextlib.nullcontext, Muon.early_step):
        model = parallel(Toy(), layout, size)
        optimizer = Muon(model, **OPTIONS, bucket_bytes=bucket_bytes)
        for step in range(STEPS):
            with make(optimizer):
                toy_loss_of(model, text(6 * size, seed=step).chunk(size)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(state_of(model, optimizer))
    assert_same(*found)


@pytest.mark.parametrize(("size", "layout", "bucket_bytes"), [(2, "dedicated", 2**28), (4, "dedicated hsdp", 1)])
def test_matrices_of_every_kind(worlds: Worlds, size: int, layout: str, bucket_bytes: int) -> None:
    worlds(size).run(toys, layout, bucket_bytes)


class Recomputed(Stack):
    """Runs blocks as checkpoints once did: those that run twice get their gradients one by one."""

    def forward(self, given: Tensor) -> Tensor:
        x = self.embedding(given)
        for place in self.runs:
            x = x + checkpoint(self.blocks[place], x, use_reentrant=True)
        return self.head(self.mixer(x))


def twice(rank: int, size: int) -> None:
    """A block is to run again whose gradient has moved it already."""
    model = dedicated(size, make=Recomputed)
    optimizer = Muon(model, verbose=False, bucket_bytes=1)
    for step in range(UNLIKE):
        plainly(model, optimizer, step, optimizer.early_step)
        optimizer.zero_grad()
    before, model.runs = state_of(model, optimizer), [0, 1, 4, 2, 3, 4]
    with waiting(), optimizer.early_step(), pytest.raises(UsageError, match="used again after its owner has begun"):
        loss_of(model, 0).backward()
    assert optimizer.traffic is not None and optimizer.traffic.early_runs > 0
    optimizer.zero_grad()
    assert loss_of(model, 0).isfinite()
    assert_same(state_of(model, optimizer), before)


def test_a_block_that_runs_once_more_is_an_error_by_name(worlds: Worlds) -> None:
    worlds(1).run(twice)

"""Forward and backward of a model with dedicated matrices: what comes, goes and is summed when, alike on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from dmuon_tune.errors import UsageError

from ..distributed.control import Control
from ..distributed.early import Early
from ..eager import uncompiled
from ..phases import phase
from .carrier import Carrier, Sum
from .unit import Member, Unit

AHEAD = 1  # units that come while one is used
APPROACHING = 2  # units behind those that come to their nodes


@dataclass
class Backward:
    """One under way: units whose weights are still to come and those whose gradients are to go, in order; ``expected``
    says of each how many gradients make it complete, ``offered`` how many of the ``sums`` an optimizer has been shown.
    """

    coming: deque[Unit]
    going: deque[Unit]
    expected: dict[Unit, int]
    sums: list[tuple[Unit, Sum]]
    offered: int = 0


class Passes:
    """Hooks the ``units`` of ``model``, (unit, module) in the order in which they run.

    Which transfers there are, and in which order, does not depend on what a rank's modules do: in a forward all units
    that are not here come in this order, in a backward in the reverse, and gradients go in the reverse. A module that
    runs earlier lets those before it come, and one that does not run is given its weights for nothing. Only what runs
    once more, after its weights are gone, asks the others whether they do so too.
    """

    def __init__(self, model: nn.Module, units: Sequence[tuple[Unit, nn.Module]], carrier: Carrier, control: Control
                 ) -> None:
        self.reduces = True  # at the end of a backward, or not yet
        self.early: Early | None = None  # that waits for gradients, or has begun by some
        self._units = [unit for unit, _ in units]
        self._place = {unit: place for place, unit in enumerate(self._units)}
        self._root = next((unit for unit, module in units if module is model), None)
        self._carrier, self._control = carrier, control
        self._forward: deque[Unit] | None = None  # units still to come in the forward under way
        self._backward: Backward | None = None
        self._transfers = 0  # so far, which ranks compare
        model.register_forward_pre_hook(self._enter, prepend=True)
        for at, (unit, module) in enumerate(units):
            if module is not model:
                module.register_forward_pre_hook(partial(self._use, unit))
                module.register_forward_hook(partial(self._used, unit))
            for place, member in enumerate(unit.members):
                p: Any = member.p  # whose methods have no types
                p.register_hook(_weakly(self._comes, at, place))
                p.register_post_accumulate_grad_hook(_weakly(self._came, at, place))
        model.register_forward_hook(self._leave)

    def release(self) -> None:
        """Take all weights back."""
        for unit in self._units:
            if unit.is_here:
                self._carrier.release(unit)

    def undo(self) -> None:
        """Let weights be those of the last step."""
        if self.early is not None:
            self.early.drop()

    def settle(self) -> None:
        """End what was broken off by an exception: what other ranks may have done of it is done, the rest void."""
        if self._forward is not None:
            self._come(self._forward)
            self._forward = None
            self.release()
        if self._backward is not None:
            self.undo()
            self._come(self._backward.coming)
            for _, sum_ in self._backward.sums:
                sum_.wait()
            self._backward = None
            for unit in self._units:
                unit.sums.lose()
            self.release()

    @uncompiled
    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if _in_backward():
            self._begin_backward()
            return
        self.settle()
        self.undo()
        self._control.agree(f"forward after {self._transfers} transfers")
        self._forward = deque(unit for unit in self._units if not unit.is_here)
        for _ in range(min(1 + AHEAD, len(self._forward))):
            self._fetch(self._forward.popleft())
        self._approach(self._forward)
        if self._root is not None:
            self._need(self._root, self._forward)

    @uncompiled
    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if _in_backward() or self._forward is None:
            return
        self._come(self._forward)
        self._forward = None
        stays = torch.is_grad_enabled()
        for unit in self._units:
            if unit.is_here and not (stays and unit.stays):
                self._carrier.release(unit)
        if stays:
            for tensor in _differentiable(output):
                tensor.register_hook(self._reaches_root)

    @uncompiled
    def _use(self, unit: Unit, module: nn.Module, arguments: Any) -> None:
        if _in_backward():  # recomputes
            self._reaches(unit, None)
        else:
            self._need(unit, self._forward)

    @uncompiled
    def _used(self, unit: Unit, module: nn.Module, arguments: Any, output: Any) -> None:
        if _in_backward():
            return
        if not torch.is_grad_enabled():
            self._carrier.release(unit)
            return
        if not unit.stays:
            self._carrier.release(unit)
        for tensor in _differentiable(output):
            tensor.register_hook(partial(self._reaches, unit))

    def _need(self, unit: Unit, order: deque[Unit] | None) -> None:
        """Let a unit's weights come, those before it with them, and the next ones behind."""
        if not unit.is_here:
            if order is not None and unit in order:
                while not unit.is_here:
                    self._fetch(order.popleft())
            else:
                what = f"weights of {unit.name} once more, after {self._transfers} transfers"
                self._control.agree(what, error=self._moved(unit))
                self._fetch(unit)
        while order and abs(self._place[order[0]] - self._place[unit]) <= AHEAD:
            self._fetch(order.popleft())
        self._approach(order or ())
        self._carrier.wait(unit)

    def _moved(self, unit: Unit) -> UsageError | None:
        """Why its weights cannot come: their owner has begun the next step."""
        for whole, p in unit.members:
            if self.early is not None and self.early.has_begun(p):
                return UsageError(
                    f"{whole.name}: it is used again after its owner has begun the step; run this backward without "
                    "early_step, or checkpoint activations with use_reentrant=False"
                )
        return None

    def _approach(self, order: Iterable[Unit]) -> None:
        """Let those that are next come as far as their nodes."""
        for unit in islice(order, APPROACHING):
            self._carrier.approach(unit)

    def _come(self, order: deque[Unit]) -> None:
        """All that have not come, for the other ranks' sake."""
        while order:
            self._fetch(order.popleft())

    def _fetch(self, unit: Unit) -> None:
        with phase("weights"):
            self._transfers += 1
            self._carrier.fetch(unit)

    @uncompiled
    def _reaches_root(self, gradient: Tensor) -> None:
        backward = self._begin_backward()
        if self._root is not None:
            self._need(self._root, backward.coming)

    @uncompiled
    def _reaches(self, unit: Unit, gradient: Tensor | None) -> None:
        backward = self._begin_backward()
        self._need(unit, backward.coming)

    def _begin_backward(self) -> Backward:
        if self._backward is None:
            self.undo()
            expected = {unit: sum(member.p.requires_grad for member in unit.members) for unit in self._units}
            last_first = self._units[::-1]
            coming = sorted(last_first, key=lambda unit: unit is not self._root)  # whose weights all may use
            self._backward = Backward(
                deque(unit for unit in coming if not unit.is_here),
                deque(unit for unit in last_first if expected[unit]), expected, [],
            )
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    @uncompiled
    def _comes(self, at: int, place: int, gradient: Tensor) -> None:
        """A gradient is complete, before autograd adds it."""
        unit = self._units[at]
        member = unit.members[place]
        backward = self._begin_backward()
        if unit in backward.expected and unit not in backward.going and self.reduces:
            raise UsageError(
                f"{member.whole.name}: another gradient came after those of {unit.name} were summed over the ranks; "
                "checkpoint activations with use_reentrant=False, and freeze nothing between a forward and its backward"
            )
        unit.sums.hold(place, member.p.grad)
        member.p.grad = None

    @uncompiled
    def _came(self, at: int, place: int, p: Tensor) -> None:
        unit, backward, gradient = self._units[at], self._begin_backward(), p.grad
        assert gradient is not None
        unit.sums.add(place, gradient)
        p.grad = unit.sums.before
        if len(unit.sums.fresh) < backward.expected[unit]:
            return
        if len(unit.sums.fresh) == len(unit.members):
            self._carrier.release(unit)  # what has given the gradients of all has read all of them
        going = backward.going
        while self.reduces and going and len(going[0].sums.fresh) >= backward.expected[going[0]]:
            self._reduce(going.popleft(), backward)
        if self.early is not None and self.early.is_waiting:
            self._offer(self.early, backward)

    def _offer(self, early: Early, backward: Backward) -> None:
        """Show it the means that are there of what has had no gradient before: on all ranks they are whole."""
        with early.arriving():
            while backward.offered < len(backward.sums) and backward.sums[backward.offered][1].is_there():
                unit, sum_ = backward.sums[backward.offered]
                backward.offered += 1
                means = dict(zip(unit.own, unit.sums.packing.own(sum_.mean(), unit.own), strict=True))
                early.arrived({
                    member.p: means[place] for place, member in enumerate(unit.members)
                    if place in means and place in unit.sums.fresh and _is_new(member)
                })

    def _reduce(self, unit: Unit, backward: Backward) -> None:
        with phase("gradients"):
            self._transfers += 1
            backward.sums.append((unit, self._carrier.reduce(unit, unit.sums.taken(len(unit.members)))))

    def _end_backward(self) -> None:
        backward = self._backward
        assert backward is not None
        self._come(backward.coming)
        self.release()
        if self.reduces:
            self._deliver(backward, self._agreed(backward))
            if self.early is not None:
                self.early.delivered()
        else:
            self._mark()
        self._backward = None

    def _agreed(self, backward: Backward) -> dict[Unit, list[int]]:
        """The places of those that have a gradient on any rank, by unit; collective."""
        for unit in self._units:
            for place in (unit.sums.waiting | unit.sums.lost) - unit.sums.fresh:
                if unit.members[place].p.grad is None:  # dropped meanwhile
                    unit.sums.drop(place)
        flags = [place in unit.sums.waiting for unit in self._units for place in range(len(unit.members))]
        what = f"backward after {self._transfers - len(backward.sums)} transfers of weights"
        found = iter(self._control.agree(what, flags))
        return {unit: [place for place, flag in zip(range(len(unit.members)), found, strict=False) if flag]
                for unit in self._units}

    def _deliver(self, backward: Backward, given: dict[Unit, list[int]]) -> None:
        """Sum what has not been summed, and give every parameter its gradient: the owner's, or the mark of it."""
        for unit in backward.going:
            if given[unit]:
                self._reduce(unit, backward)
        for unit, sum_ in backward.sums:
            own = self._own(unit, sum_.wait())
            for place in given[unit]:
                member = unit.members[place]
                before, gradient = member.p.grad, own.get(place, member.whole.mark)
                if place in own and before is not None and not _is_new(member):
                    gradient = before.add_(gradient)
                member.p.grad = gradient
            unit.sums.forget()

    def _own(self, unit: Unit, segment: Tensor) -> dict[int, Tensor]:
        """What a reduction has brought to this owner, in its weights' dtype."""
        wholes = {place: unit.members[place].whole for place in unit.own}
        own = zip(unit.own, unit.sums.packing.own(segment, unit.own), strict=True)
        return {place: gradient.to(wholes[place].weight.dtype) for place, gradient in own}

    def _mark(self) -> None:
        """Parameters whose gradients wait show that they have one."""
        for unit in self._units:
            for place in unit.sums.fresh:
                member = unit.members[place]
                member.p.grad = member.whole.mark if member.p.grad is None else member.p.grad
            unit.sums.end()


def _is_new(member: Member) -> bool:
    """Whether no earlier backward has brought a gradient."""
    return member.p.grad is None or member.p.grad is member.whole.mark


def _weakly(method: Callable[..., None], *given: int) -> Callable[[Tensor], None]:
    """A parameter's hook, which keeps nothing alive: no collector would see that it does."""
    reference = WeakMethod(method)

    def call(tensor: Tensor) -> None:
        found = reference()
        assert found is not None
        found(*given, tensor)

    return call


def _in_backward() -> bool:
    """Whether autograd runs a backward, in which modules recompute what they did."""
    return torch._C._current_graph_task_id() != -1


def _differentiable(output: Any) -> Iterator[Any]:
    """The tensors of a module's output that a backward may begin with."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif is_dataclass(output):
        yield from _each(getattr(output, field.name) for field in fields(output))
    elif isinstance(output, dict):
        yield from _each(output.values())
    elif isinstance(output, list | tuple):
        yield from _each(output)


def _each(outputs: Iterable[Any]) -> Iterator[Any]:
    for output in outputs:
        yield from _differentiable(output)

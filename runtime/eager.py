"""PyTorch's optimizers without the import of its compiler, which takes seconds and begins most of their methods.

They import it to keep themselves out of what it compiles. Where it has not been imported nothing is being compiled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import AdamW, Optimizer

Method = TypeVar("Method", bound=Callable[..., Any])


def uncompiled(method: Method) -> Method:
    """A method that a compiled training step calls as it is."""
    kept_out = _disable_dynamo(method)

    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        return (kept_out if "torch._dynamo" in sys.modules else method)(*arguments, **named)

    return run  # type: ignore[return-value]


def _eager(method: Method) -> Method:
    """The same of a method that PyTorch has wrapped so."""
    unwrapped: Method = inspect.unwrap(method)
    return uncompiled(unwrapped)


class EagerOptimizer(Optimizer):
    """An optimizer whose inherited methods do not import the compiler."""

    add_param_group = _eager(Optimizer.add_param_group)
    zero_grad = _eager(Optimizer.zero_grad)
    state_dict = _eager(Optimizer.state_dict)
    load_state_dict = _eager(Optimizer.load_state_dict)


class EagerAdamW(EagerOptimizer, AdamW):
    """PyTorch's, as a step that is itself kept out of what is compiled runs it. Its fused kernels walk memory flat, so
    gradients that lie otherwise than their parameter are laid like it first; state is to lie so: :func:`lay_state`."""

    _stepped = torch.no_grad()(inspect.unwrap(AdamW.step))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = laid_like(p, p.grad)
        return self._stepped(closure)


def lay_state(p: Tensor, state: dict[str, Any]) -> None:
    """Let what AdamW keeps of a parameter lie as it does."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == p.shape:
            state[key] = laid_like(p, value)


def laid_like(p: Tensor, other: Tensor) -> Tensor:
    """A tensor of the parameter's shape that lies as it does: ``other`` itself or a copy."""
    return other if other.stride() == p.stride() else torch.empty_like(p, dtype=other.dtype).copy_(other)

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
    """PyTorch's, as a step that is itself kept out of what is compiled runs it."""

    step = torch.no_grad()(inspect.unwrap(AdamW.step))

"""Reads the parameters' shapes of a model that a Python function builds on the meta device."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from dmuon_tune.errors import UsageError

from . import ModelShapes


def load(reference: str) -> ModelShapes:
    """The parameters of what ``module:function`` returns when called with no arguments under ``torch.device("meta")``.

    The current folder is importable. UsageError where it cannot be imported, fails, or returns no torch.nn.Module.
    """
    import torch

    build = _function(reference)
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        raise UsageError(
            f"{reference}: failed on the meta device: {type(error).__name__}: {_first_line(error)}; "
            "--debug shows where"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{reference}: must return a torch.nn.Module, not {type(model).__name__}")
    return ModelShapes(reference, tuple((name, tuple(value.shape)) for name, value in model.named_parameters()))


def _function(reference: str) -> Any:
    module_name, _, attribute = reference.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"{reference}: module {module_name!r} cannot be imported: {type(error).__name__}: {_first_line(error)}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{reference}: {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{reference}: {attribute!r} is not a function that builds the model")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]

"""Reads the parameters' shapes of a model that a Python function builds on the meta device."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from dmuon_tune.errors import UsageError, said

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
        if isinstance(model, torch.nn.Module):
            return ModelShapes(reference, tuple((name, tuple(value.shape)) for name, value in model.named_parameters()))
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--model {reference}: failed on the meta device: {said(error)}; --debug shows where"
        ) from error
    raise UsageError(f"--model {reference}: must return a torch.nn.Module, not {type(model).__name__}")


def _function(reference: str) -> Any:
    module_name, _, attribute = reference.partition(":")
    try:
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise UsageError(f"--model {reference}: {module_name!r} has no {attribute!r}")
            found = getattr(found, part)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--model {reference}: module {module_name!r} cannot be imported: {said(error)}"
        ) from error
    if not callable(found):
        raise UsageError(f"--model {reference}: {attribute!r} is not a function that builds the model")
    return found

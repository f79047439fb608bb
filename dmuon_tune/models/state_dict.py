"""Reads the parameters' shapes from a torch.save'd state dict, without its data and without running its code."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmuon_tune.errors import UsageError

from . import ModelShapes

# Where trainers put the model inside a checkpoint (PyTorch's tutorials, Lightning, DeepSpeed, timm).
WRAPPER_KEYS = ("state_dict", "model", "model_state_dict", "module", "model_state", "net", "params")


def load(path: Path) -> ModelShapes:
    """The tensors of a state dict, also where it lies under a key of a checkpoint; UsageError where there is none."""
    state = _tensors(_read(path))
    if not state:
        raise UsageError(f"{path}: holds no state dict (looked at the top and under {', '.join(WRAPPER_KEYS)})")
    return ModelShapes(str(path), tuple((name, tuple(tensor.shape)) for name, tensor in state.items()))


def _read(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        first_line = str(error).splitlines()[0].partition(". ")[0]
        raise UsageError(
            f"{path}: not a state dict of tensors only ({first_line}); save model.state_dict() alone"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        said = (str(error).splitlines() or ["empty"])[0]
        raise UsageError(f"{path}: not a torch.save'd file, or truncated: {said}") from error


def _tensors(value: Any) -> dict[str, Any]:
    import torch

    if not isinstance(value, Mapping):
        return {}
    tensors = {name: item for name, item in value.items() if isinstance(item, torch.Tensor) and isinstance(name, str)}
    nested = [found for key in WRAPPER_KEYS if (found := _tensors(value.get(key)))]
    # A checkpoint may carry loose tensors (a step, a random state) beside the model.
    return max([tensors, *nested], key=len)

"""Reads the parameters' shapes from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dmuon_tune.errors import UsageError

from . import ModelShapes
from .architectures import ARCHITECTURES, Fields


def load(path: Path) -> ModelShapes:
    """The parameters that the config's ``model_type`` has; UsageError for what is missing or not supported."""
    config = read_json(path)
    model_type = config.get("model_type")
    if model_type is None:
        raise UsageError(f"{path}: field 'model_type' is missing; is this a Hugging Face config.json?")
    if model_type not in ARCHITECTURES:
        raise UsageError(
            f"{path}: model_type {model_type!r} is not supported (supported: {', '.join(ARCHITECTURES)}); "
            "give its .safetensors file or index, a state dict, or module:function instead"
        )
    return ModelShapes(str(path), tuple(ARCHITECTURES[model_type](Fields(config, str(path)))))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; UsageError where it cannot be read as one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value

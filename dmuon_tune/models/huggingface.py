"""Reads the parameters' shapes from a Hugging Face ``config.json``."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from dmuon_tune.errors import UsageError

from . import ModelShapes, json_text
from .architectures import ARCHITECTURES
from .fields import Fields


def load(path: Path) -> ModelShapes:
    """The parameters that the config's ``model_type`` has; UsageError for what is missing or not supported."""
    config = read_json(path)
    model_type = config.get("model_type")
    if model_type is None:
        raise UsageError(f"{path}: field 'model_type' is missing; is this a Hugging Face config.json?")
    if not isinstance(model_type, str):
        raise UsageError(f"{path}: field 'model_type' must be a string, not {reprlib.repr(model_type)}")
    if model_type not in ARCHITECTURES:
        raise UsageError(
            f"{path}: model_type {reprlib.repr(model_type)} is not supported (supported: {', '.join(ARCHITECTURES)}); "
            "give its .safetensors file or index, a state dict, or module:function instead"
        )
    return ModelShapes(str(path), tuple(ARCHITECTURES[model_type](Fields(config, str(path)))))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; UsageError where it cannot be read as one."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    return json_text.parse(text, f"{path}: file")

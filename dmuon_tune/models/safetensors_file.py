"""Reads the parameters' shapes from safetensors headers, of one file or of the shards an index names."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from dmuon_tune.errors import UsageError

from . import ModelShapes, NamedShapes
from .huggingface import read_json

MAX_HEADER_BYTES = 100_000_000  # the format's own limit (safetensors, src/tensor.rs)


def load(path: Path) -> ModelShapes:
    """The parameters of one ``.safetensors`` file; only its header is read."""
    return ModelShapes(str(path), _header(path))


def load_index(path: Path) -> ModelShapes:
    """The parameters of a sharded checkpoint, in the index's order; every shard must lie beside the index."""
    weight_map = _weight_map(path)
    absent = absent_shards(path)
    if absent:
        shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise UsageError(f"{path}: shards are absent beside it: {shown}; fetch them, or give its config.json")
    shapes = {name: shape for shard in sorted(set(weight_map.values())) for name, shape in _header(path.parent / shard)}
    missing = next((name for name in weight_map if name not in shapes), None)
    if missing is not None:
        raise UsageError(f"{path}: {missing!r} is not in its shard {weight_map[missing]}")
    return ModelShapes(str(path), tuple((name, shapes[name]) for name in weight_map))


def absent_shards(path: Path) -> list[str]:
    """The shard files that an index names and that do not lie beside it."""
    return [shard for shard in sorted(set(_weight_map(path).values())) if not (path.parent / shard).is_file()]


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{path}: field 'weight_map' is missing or empty; is this a safetensors index?")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UsageError(f"{path}: {shard!r} is not the name of a file beside the index")
    return weight_map


def _header(path: Path) -> NamedShapes:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise UsageError(f"{path}: truncated: {len(start)} bytes, a safetensors file begins with 8")
            (size,) = struct.unpack("<Q", start)
            if size > MAX_HEADER_BYTES:
                raise UsageError(
                    f"{path}: header of {size} bytes is over the format's limit of {MAX_HEADER_BYTES}; "
                    "not a safetensors file"
                )
            text = file.read(size)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) < size:
        raise UsageError(f"{path}: truncated: header of {size} bytes, {len(text)} there; download it again")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: header is not JSON: {error}; not a safetensors file") from error
    if not isinstance(header, dict):
        raise UsageError(f"{path}: header is not a JSON object; not a safetensors file")
    return tuple((name, _shape(path, name, entry)) for name, entry in header.items() if name != "__metadata__")


def _shape(path: Path, name: str, entry: Any) -> tuple[int, ...]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise UsageError(f"{path}: tensor {name!r} has no valid shape; not a safetensors file")
    return tuple(shape)

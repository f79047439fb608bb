"""Reads the parameters' shapes from safetensors headers, of one file or of the shards an index names."""

from __future__ import annotations

import reprlib
import struct
from math import prod
from pathlib import Path
from typing import Any

from dmuon_tune.errors import UsageError
from dmuon_tune.words import counted

from . import MAX_ELEMENTS, ModelShapes, NamedShapes, json_text
from .huggingface import read_json

MAX_HEADER_BYTES = 100_000_000  # the format's own limit (safetensors, src/tensor.rs)

MAX_NAME_BYTES = 255  # of a file on any file system


def load(path: Path) -> ModelShapes:
    """The parameters of one ``.safetensors`` file; only its header is read."""
    return ModelShapes(str(path), _header(path))


def load_index(path: Path) -> ModelShapes:
    """The parameters of a sharded checkpoint, of those that the index names; every shard must lie beside the index."""
    weight_map = _weight_map(path)
    absent = absent_shards(path)
    if absent:
        shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise UsageError(f"{path}: shards are absent beside it: {shown}; fetch them, or give its config.json")
    shapes = {name: shape for shard in sorted(set(weight_map.values())) for name, shape in _header(path.parent / shard)}
    missing = next((name for name in weight_map if name not in shapes), None)
    if missing is not None:
        raise UsageError(f"{path}: {missing!r} is not in its shard {weight_map[missing]!r}")
    return ModelShapes(str(path), tuple((name, shapes[name]) for name in weight_map))


def absent_shards(path: Path) -> list[str]:
    """The shard files that an index names and that do not lie beside it."""
    return [shard for shard in sorted(set(_weight_map(path).values())) if not (path.parent / shard).is_file()]


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{path}: field 'weight_map' is missing or empty; is this a safetensors index?")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise UsageError(f"{path}: weight_map: {reprlib.repr(shard)} is not the name of a file beside the index")
    return weight_map


def _is_file_name(text: str) -> bool:
    named = text not in ("", "..") and text.isprintable() and Path(text).name == text
    return named and len(text.encode()) <= MAX_NAME_BYTES


def _header(path: Path) -> NamedShapes:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise UsageError(f"{path}: truncated: {counted(len(start), 'byte')}, a safetensors file begins with 8")
            (size,) = struct.unpack("<Q", start)
            if size > MAX_HEADER_BYTES:
                raise UsageError(
                    f"{path}: header of {counted(size, 'byte')} is over the format's limit of {MAX_HEADER_BYTES}; "
                    "not a safetensors file"
                )
            text = file.read(size)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) < size:
        raise UsageError(f"{path}: truncated: header of {counted(size, 'byte')}, {len(text)} there; download it again")
    header = json_text.parse(text, f"{path}: not a safetensors file: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise UsageError(f"{path}: header's __metadata__ is not an object; not a safetensors file")
    return tuple((name, _shape(path, name, entry)) for name, entry in header.items())


def _shape(path: Path, name: str, entry: Any) -> tuple[int, ...]:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    for field, valid in (
        ("shape", _naturals(fields.get("shape")) and prod(fields["shape"]) <= MAX_ELEMENTS),
        ("dtype", isinstance(fields.get("dtype"), str)),
        ("data_offsets", _naturals(fields.get("data_offsets")) and len(fields["data_offsets"]) == 2),
    ):
        if not valid:
            raise UsageError(f"{path}: tensor {reprlib.repr(name)} has no valid {field}; not a safetensors file")
    return tuple(fields["shape"])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_ELEMENTS for item in value)

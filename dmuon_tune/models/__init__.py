"""Where matrix shapes come from: one file per source, and the detection that picks the source for ``--model``."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

from dmuon_tune.errors import UsageError

NamedShapes = tuple[tuple[str, tuple[int, ...]], ...]
MAX_ELEMENTS = 2**63 - 1  # of one parameter: a tensor's size is a signed 64-bit integer

FORMS = (
    "a preset name, a Hugging Face config.json or its folder, a .safetensors file, a model.safetensors.index.json, "
    "a torch.save'd state dict (.pt, .pth, .bin), or module:function"
)
_MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class ModelShapes:
    """Every parameter of one model, (name, shape as stored) in the order of names, and where they were read.

    Layer 2 comes before layer 10, and every source of one model gives the same order. UsageError for a name that no
    terminal can show and for a shape that no memory can hold.
    """

    label: str
    parameters: NamedShapes

    def __post_init__(self) -> None:
        for name, shape in self.parameters:
            if not name.isprintable():
                raise UsageError(f"{self.label}: parameter name {reprlib.repr(name)} is not printable text")
            if prod(shape) > MAX_ELEMENTS:
                raise UsageError(f"{self.label}: {reprlib.repr(name)} of shape {reprlib.repr(shape)} is too large")
        object.__setattr__(self, "parameters", tuple(sorted(self.parameters, key=_by_name)))


def _by_name(parameter: tuple[str, tuple[int, ...]]) -> list[tuple[int, str]]:
    # Odd parts are numbers: the shorter is the smaller, so 2 comes before 10.
    parts = re.split(r"([0-9]+)", parameter[0])
    return [(len(part) if index % 2 else 0, part) for index, part in enumerate(parts)]


def load(model: str) -> ModelShapes:
    """The parameters of ``model``, whatever form it is given in; UsageError says which forms there are."""
    from . import presets, python_model

    if model.lower() in presets.names():
        return presets.load(model)
    if not model.strip():
        raise UsageError(f"--model is empty; give {FORMS}")
    path = _existing(model)
    if path is not None:
        return load_path(path)
    if _MODULE_FUNCTION.fullmatch(model):
        return python_model.load(model)
    raise UsageError(
        f"model {_short(model)} is neither a file here nor a preset ({', '.join(presets.names())}); give {FORMS}"
    )


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name too long for the file system; ~user of nobody
        return None


def _short(text: str) -> str:
    return repr(text) if len(text) <= 200 else repr(text[:200]) + "…"


def load_path(path: Path) -> ModelShapes:
    """The parameters that a file or a checkpoint's folder holds."""
    from . import huggingface, safetensors_file, state_dict

    if path.is_dir():
        return load_path(_of_folder(path))
    if path.name.endswith(".safetensors.index.json"):
        return safetensors_file.load_index(path)
    if path.suffix == ".safetensors":
        return safetensors_file.load(path)
    if path.suffix == ".json":
        return huggingface.load(path)
    return state_dict.load(path)


def _of_folder(folder: Path) -> Path:
    # Headers first: they list what is really stored; the config says what its model type should hold.
    from . import safetensors_file

    index = folder / "model.safetensors.index.json"
    if index.is_file() and not safetensors_file.absent_shards(index):
        return index
    for name in ("model.safetensors", "config.json", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name
    if index.is_file():
        return index
    raise UsageError(f"{folder}: holds no config.json, model.safetensors, its index, or pytorch_model.bin")

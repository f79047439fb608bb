"""Where matrix shapes come from: one file per source, and the detection that picks the source for ``--model``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dmuon_tune.errors import UsageError

NamedShapes = tuple[tuple[str, tuple[int, ...]], ...]

FORMS = (
    "a preset name, a Hugging Face config.json or its folder, a .safetensors file, a model.safetensors.index.json, "
    "a torch.save'd state dict (.pt, .pth, .bin), or module:function"
)
_MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class ModelShapes:
    """Every parameter of one model: (name, shape as stored), and where they were read."""

    label: str
    parameters: NamedShapes


def load(model: str) -> ModelShapes:
    """The parameters of ``model``, whatever form it is given in; UsageError says which forms there are."""
    from . import presets, python_model

    if model.lower() in presets.names():
        return presets.load(model)
    path = Path(model).expanduser()
    if path.exists():
        return load_path(path)
    if _MODULE_FUNCTION.fullmatch(model):
        return python_model.load(model)
    raise UsageError(
        f"model {model!r} is neither a file here nor a preset ({', '.join(presets.names())}); give {FORMS}"
    )


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

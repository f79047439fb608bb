"""Shapes read from files and Python: what is read, and the one line said for what cannot be."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon_tune.errors import UsageError
from dmuon_tune.matrices import select
from dmuon_tune.models import load, load_path, presets, shape_text
from dmuon_tune.recipe import Group

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10,
}


def write_config(folder: Path, fields: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


def write_header(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    entries = {name: {"dtype": "F16", "shape": list(shape), "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def counts(model: Path | str) -> dict[tuple[int, int], int]:
    return select(load(str(model)).parameters).counts()


def test_config_shapes_follow_grouped_query_attention(tmp_path: Path) -> None:
    assert counts(write_config(tmp_path, LLAMA)) == {(32, 32): 4, (16, 32): 4, (48, 32): 4, (32, 48): 2}


def test_config_without_optional_fields_takes_the_model_types_defaults(tmp_path: Path) -> None:
    gemma = {**LLAMA, "model_type": "gemma", "num_key_value_heads": None}
    assert counts(write_config(tmp_path, gemma))[1024, 32] == 6  # q, k, v: 4 heads of Gemma's 256


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gemma"])
@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_config_names_the_missing_field(tmp_path: Path, model_type: str, field: str) -> None:
    fields = {name: value for name, value in LLAMA.items() if name != field}
    with pytest.raises(UsageError, match=f"config.json: field '{field}' is missing"):
        load_path(write_config(tmp_path, {**fields, "model_type": model_type}))


def test_config_of_another_model_type_names_the_supported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'mamba' is not supported .supported: llama.*safetensors"):
        load_path(write_config(tmp_path, {"model_type": "mamba"}))
    with pytest.raises(UsageError, match="'model_type' is missing"):
        load_path(write_config(tmp_path, {}))


def test_safetensors_of_the_library_itself_are_read(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"layers.0.up.weight": torch.zeros(6, 4), "norm.weight": torch.zeros(4)}, tmp_path / "m.safetensors")
    assert sorted(load(str(tmp_path / "m.safetensors")).parameters) == [
        ("layers.0.up.weight", (6, 4)), ("norm.weight", (4,)),
    ]


def sharded(folder: Path, shards: int = 3) -> Path:
    parameters = presets.load("qwen2.5-7b").parameters
    parts = [dict(parameters[start::shards]) for start in range(shards)]
    names = [f"model-{part + 1:05}-of-{shards:05}.safetensors" for part in range(shards)]
    weight_map = {name: names[part] for part in range(shards) for name in sorted(parts[part])}
    for name, part in zip(names, parts, strict=True):
        write_header(folder / name, part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_index_reads_every_shards_header(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    expected = select(presets.load("qwen2.5-7b").parameters).counts()
    assert counts(index) == expected
    assert counts(tmp_path) == expected


def test_index_names_the_absent_shards_and_its_folder_falls_back_to_the_config(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UsageError, match="absent beside it: model-00002-of-00003.safetensors"):
        load_path(index)
    write_config(tmp_path, presets.CONFIGS["qwen2.5-7b"])
    assert counts(tmp_path) == select(presets.load("qwen2.5-7b").parameters).counts()


@pytest.mark.parametrize("key", [None, "model", "state_dict", "module"])
@pytest.mark.parametrize("zipped", [True, False])
def test_state_dict_is_found_in_a_checkpoint(tmp_path: Path, key: str | None, zipped: bool) -> None:
    state = torch.nn.Linear(4, 6).state_dict()
    saved = state if key is None else {key: state, "step": torch.tensor(3), "epoch": 1}
    torch.save(saved, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    assert load(str(tmp_path / "m.pt")).parameters == (("bias", (6,)), ("weight", (6, 4)))


class Custom:
    """Not a tensor: loading it would run code."""


@pytest.mark.parametrize("damage", ["object", "truncated", "text", "empty", "number"])
def test_bad_state_dicts_get_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m.pt"
    torch.save({"model": Custom()} if damage == "object" else torch.nn.Linear(4, 6).state_dict(), path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:700])
    if damage in ("text", "empty"):
        path.write_text("weights" if damage == "text" else "")
    if damage == "number":
        torch.save(3, path)
    with pytest.raises(UsageError, match=r"m\.pt: ") as caught:
        load_path(path)
    assert "\n" not in str(caught.value)


def test_a_function_builds_the_model_on_the_meta_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model.py").write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Linear(1 << 20, 1 << 20, bias=False)\n"
        "def fails():\n    raise RuntimeError('no\\nweights')\n"
        "def number():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load("my_model:build").parameters == (("weight", (1 << 20, 1 << 20)),)
    for reference, said in [
        ("my_model:fails", "failed on the meta device: RuntimeError: no weights;"),
        ("my_model:number", "must return a torch.nn.Module, not int"),
        ("my_model:absent", "has no 'absent'"),
        ("no_such_module:build", "cannot be imported: No module named 'no_such_module'"),
    ]:
        with pytest.raises(UsageError, match=said):
            load(reference)


RAISED = ("SystemExit(7)", "SystemExit('bye')", "SystemExit", "ValueError('a\\nb')", "Nasty()")


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("place", ["import", "attribute", "call", "parameters"])
def test_whatever_the_users_code_raises_becomes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, place: str
) -> None:
    name = f"raising_{abs(hash((raised, place)))}"
    nasty = "class Nasty(Exception):\n    def __str__(self):\n        raise TypeError('no words')\n"
    code = {
        "import": f"raise {raised}\n",
        "attribute": f"def __getattr__(name):\n    raise {raised}\n",
        "call": f"def build():\n    raise {raised}\n",
        "parameters": "import torch\nclass build(torch.nn.Module):\n"
        f"    def named_parameters(self):\n        raise {raised}\n",
    }[place]
    (tmp_path / f"{name}.py").write_text(nasty + code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^--model {name}:build: .*{raised.partition('(')[0]}") as caught:
        load(f"{name}:build")
    assert "\n" not in str(caught.value)


def test_an_interrupt_in_the_users_code_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupted.py").write_text("def build():\n    raise KeyboardInterrupt\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        load("interrupted:build")


def test_shape_text() -> None:
    assert shape_text.parse("8x2048x5464, 1024X1024,8x2048x5464") == [Group(8, 2048, 5464), Group(1, 1024, 1024)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "write rows x cols"), ("16", "write rows x cols"), ("1x2x3x4", "write rows x cols"),
        ("16x", "'' is not an integer"), ("axb", "'a' is not an integer"), ("1.5x2", "'1.5' is not an integer"),
        ("0x16", "0 is not positive"), ("-4x16", "-4 is not positive"), ("16x16,", "write rows x cols"),
        ("999999999x999999999", "too large"), ("9" * 30 + "x2", "is not an integer"), ("9999999x8x8", "too large"),
        ("٣x٣", "is not an integer"),
    ],
)
def test_bad_shape_text_gets_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shape_text.parse(text)

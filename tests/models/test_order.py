"""One model gives one table, names in one order, from whichever source its shapes are read."""

from __future__ import annotations

import json
import random
import struct
from math import prod
from pathlib import Path

import pytest
import torch

from dmuon_tune.cli import main
from dmuon_tune.models import ModelShapes, load, presets


def publish(folder: Path, preset: str) -> Path:
    """A checkpoint as published: names sorted as text, the header shuffled, data of full size in sparse files."""
    parameters = dict(presets.load(preset).parameters)
    shard_of = {name: f"model-{1 + index % 4:05}-of-00004.safetensors" for index, name in enumerate(parameters)}
    for shard in set(shard_of.values()):
        names, end, header = [name for name in parameters if shard_of[name] == shard], 0, {}
        random.Random(shard).shuffle(names)
        for name in names:
            start, end = end, end + 2 * prod(parameters[name])
            header[name] = {"dtype": "BF16", "shape": list(parameters[name]), "data_offsets": [start, end]}
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        with (folder / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    index = folder / "model.safetensors.index.json"
    weight_map = {name: shard_of[name] for name in sorted(parameters)}
    index.write_text(json.dumps({"metadata": {"total_size": 15231233024}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("preset", ["qwen2.5-7b", "llama-3-8b", "gpt2"])
def test_shapes_says_the_same_of_preset_config_and_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    index, config = publish(tmp_path, preset), tmp_path / "config.json"
    config.write_text(json.dumps(presets.CONFIGS[preset]))
    for form in ("table", "json"):
        said = []
        for source in (["--preset", preset], ["--model", str(config)], ["--model", str(index)]):
            assert main(["shapes", *source, "--format", form]) == 0
            said.append(capsys.readouterr().out.replace(json.dumps(source[1]), '"MODEL"'))
        assert said[0] == said[1] == said[2]


def test_a_state_dict_gives_the_presets_order(tmp_path: Path) -> None:
    parameters = list(presets.load("gpt2").parameters)
    random.Random(0).shuffle(parameters)
    torch.save({name: torch.empty(1).expand(shape) for name, shape in parameters}, tmp_path / "m.pt")
    assert load(str(tmp_path / "m.pt")).parameters == presets.load("gpt2").parameters


def test_layer_2_comes_before_layer_10() -> None:
    names = ["10", "9x", "a.10.b", "a.2.b", "a.b", "a.02.b", "", "a.2.a", "a" + "9" * 5000]
    given = ModelShapes("m", tuple((name, (1,)) for name in names))
    assert [name for name, _ in given.parameters] == [
        "", "9x", "10", "a" + "9" * 5000, "a.2.a", "a.2.b", "a.02.b", "a.10.b", "a.b",
    ]
    shuffled = ModelShapes("m", tuple(reversed(given.parameters)))
    assert shuffled == given

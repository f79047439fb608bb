"""JSON that cannot be used, in configs, safetensors headers and indexes: one line that names the file and the field."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_tune.errors import UsageError
from dmuon_tune.models import ModelShapes, load, load_path, presets
from dmuon_tune.models.architectures import ARCHITECTURES

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10, "tie_word_embeddings": False,
}
EXPERTS = {
    "moe_intermediate_size": 8, "n_routed_experts": 3, "num_experts": 3, "num_local_experts": 3, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": [1],
    "q_lora_rank": None, "kv_lora_rank": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 6,
}
ENTRY = {"dtype": "F16", "shape": [6, 4], "data_offsets": [0, 48]}
FILES = ("config.json", "m.safetensors", "model.safetensors.index.json")
DEEP = b'{"a":' * 100_000
NOT_INTEGERS = ["32", 3.5, 32.0, True, [32], {"a": 1}, 0, -4]


def write(path: Path, text: bytes) -> Path:
    framed = path.suffix == ".safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text if framed else text)
    return path


def refused(path: Path, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        load_path(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    assert path.name in str(caught.value)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not JSON: Expecting value"), (b"nope", "is not JSON: Expecting value"),
        (b'{"a": {}', "is not JSON: Expecting ',' delimiter"), (DEEP, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"), (b"[]", "is not a JSON object but a list"),
        (b"3", "is not a JSON object but a int"), (b'"a"', "is not a JSON object but a str"),
        (b"null", "is not a JSON object but a NoneType"), (b'{"a\xff": 1}', "is not JSON: byte 3 is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "is not JSON: byte 0 is not UTF-8"), (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b'{"a": NaN}', "NaN is no JSON number"), (b'{"a": [-Infinity]}', "-Infinity is no JSON number"),
        (b'{"a": 1, "a": 1}', "the name 'a' is given twice"), (b'{"a": {"b": 1, "b": 2}}', "'b' is given twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_what_is_no_json_object(tmp_path: Path, file: str, text: bytes, said: str) -> None:
    refused(write(tmp_path / file, text), said)


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize("field", [name for name, value in LLAMA.items() if type(value) is int])
def test_config_numbers(tmp_path: Path, field: str, value: Any) -> None:
    path = write(tmp_path / "config.json", json.dumps({**LLAMA, field: value}).encode())
    refused(path, f"field '{field}' must be a positive integer")


def test_config_numbers_that_are_too_large_or_null(tmp_path: Path) -> None:
    for field in (name for name, value in LLAMA.items() if type(value) is int):
        for value in (2**24 + 1, 10**12, 10**4000):
            refused(
                write(tmp_path / "config.json", json.dumps({**LLAMA, field: value}).encode()),
                f"field '{field}' is too large",
            )
        if field != "num_key_value_heads":
            path = write(tmp_path / "config.json", json.dumps({**LLAMA, field: None}).encode())
            refused(path, f"field '{field}' is null")
    refused(write(tmp_path / "config.json", b'{"model_type": "llama", "hidden_size": 1e999}'), "'hidden_size' must be")
    huge = {**LLAMA, "hidden_size": 2**24, "num_attention_heads": 2**24, "head_dim": 2**24}
    refused(write(tmp_path / "config.json", json.dumps(huge).encode()), "_proj.weight' of shape .* is too large")


@pytest.mark.parametrize("value", ["true", 1, 0.0, [True], {}], ids=repr)
@pytest.mark.parametrize("field", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_config_flags(tmp_path: Path, field: str, value: Any) -> None:
    path = write(tmp_path / "config.json", json.dumps({**LLAMA, field: value}).encode())
    refused(path, f"field '{field}' must be true or false")


@pytest.mark.parametrize("value", [["qwen2"], {"a": 1}, 3, True], ids=repr)
def test_config_model_type_and_sections(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "config.json", json.dumps({**LLAMA, "model_type": value}).encode())
    refused(path, "field 'model_type' must be a string")
    for name in () if isinstance(value, dict) else ("text_config", "vision_config"):
        sections = {"model_type": "paligemma", "text_config": LLAMA, "vision_config": LLAMA, name: value}
        refused(write(path, json.dumps(sections).encode()), f"section '{name}' must be an object")


@pytest.mark.parametrize("entry", [None, 3, "a", [], {}], ids=repr)
def test_header_entries_that_are_no_objects(tmp_path: Path, entry: Any) -> None:
    refused(write(tmp_path / "m.safetensors", json.dumps({"a": entry}).encode()), "tensor 'a' has no valid shape")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("shape", [None, "6", 6, ["6"], [6.0], [True], [-1], [None], [[6]], [2**63], [0, 2**64], [2**32, 2**32]]),
        ("dtype", [None, 16, ["F16"]]),
        ("data_offsets", [None, 0, [0], [0, 1, 2], ["0", 48], [0, -1], [0, 48.0], [False, 48]]),
    ],
)
def test_header_fields(tmp_path: Path, field: str, values: list[Any]) -> None:
    for value in values:
        path = write(tmp_path / "m.safetensors", json.dumps({"a": {**ENTRY, field: value}}).encode())
        refused(path, f"tensor 'a' has no valid {field}")


def test_header_names_and_metadata(tmp_path: Path) -> None:
    for name in ("a\nb", "\ud800", "\x1b[31m"):
        refused(write(tmp_path / "m.safetensors", json.dumps({name: ENTRY}).encode()), "is not printable text")
    refused(write(tmp_path / "m.safetensors", b'{"__metadata__": 3}'), "__metadata__ is not an object")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x05\x00", "truncated: 2 bytes"),
        (struct.pack("<Q", 100) + b'{"a":', "truncated: header of 100 bytes, 5 there"),
        (struct.pack("<Q", 2**60) + b"{}", "over the format's limit"),
    ],
)
def test_header_lengths(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    refused(path, said)


@pytest.mark.parametrize(
    "shard",
    ["../s.safetensors", "/etc/passwd", "a/b", "", "..", ".", "a\nb", "a\0b", "\ud800", "é" * 200, 3, None, []],
    ids=ascii,
)
def test_index_names_files_beside_it_alone(tmp_path: Path, shard: Any) -> None:
    index = write(tmp_path / FILES[2], json.dumps({"weight_map": {"a": shard}}).encode())
    refused(index, "not the name of a file beside the index")


@pytest.mark.parametrize("weight_map", [None, 3, "a", [], {}, ["a"]], ids=repr)
def test_index_without_a_map(tmp_path: Path, weight_map: Any) -> None:
    index = write(tmp_path / FILES[2], json.dumps({"weight_map": weight_map}).encode())
    refused(index, "field 'weight_map' is missing or empty")


@pytest.mark.parametrize("model", ["", "  "])
def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    write(tmp_path / "config.json", json.dumps(LLAMA).encode())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="^--model is empty; give a preset name"):
        load(model)
    assert load(".").parameters


@pytest.mark.parametrize("model", ["a" * 5000, "~nobody-of-this-name/x", "a\0b", "a/" * 3000, "a\nb"])
def test_names_that_no_file_can_have(model: str) -> None:
    with pytest.raises(UsageError, match="neither a file here nor a preset") as caught:
        load(model)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


# What is given is mostly right, so that the readers get beyond the first field.
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(1, 64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CONFIGS = {**LLAMA, **presets.CONFIGS["gpt2"], **EXPERTS}
CONFIG_FIELDS = st.sampled_from(sorted({*CONFIGS, "head_dim", "num_experts_per_tok", "text_config", "vision_config"}))
CONFIG = st.builds(
    lambda model_type, changed: {**CONFIGS, "model_type": model_type, **changed},
    st.sampled_from(list(ARCHITECTURES)), st.dictionaries(CONFIG_FIELDS, ANY, max_size=2),
)
ENTRIES = st.builds(
    lambda changed: {**ENTRY, **changed}, st.dictionaries(st.sampled_from(list(ENTRY)), ANY, max_size=1)
)
HEADER = st.dictionaries(st.text(max_size=5) | st.just("__metadata__"), ENTRIES | ANY, max_size=2)
INDEX = st.fixed_dictionaries(
    {"weight_map": ANY | st.dictionaries(st.text(max_size=5), st.just("m.safetensors") | ANY, max_size=3)}
)


@settings(max_examples=250, deadline=None, database=None)
@given(
    st.sampled_from(FILES), CONFIG | HEADER | INDEX | ANY, st.none() | st.integers(0, 60), st.binary(max_size=2)
)
def test_any_json_gives_shapes_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, file: str, value: Any, cut: int | None, junk: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    write(folder / "m.safetensors", json.dumps({"a": ENTRY}).encode())
    text = json.dumps(value).encode()
    write(folder / file, text if cut is None else text[:cut] + junk + text[cut:])
    try:
        found = load_path(folder / file)
    except UsageError as error:
        assert "\n" not in str(error) and str(error).isprintable()
    else:
        assert isinstance(found, ModelShapes)
        assert all(type(extent) is int and extent >= 0 for _, shape in found.parameters for extent in shape)

"""Presets hold the parameters of the published models, down to their totals."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from dmuon_tune.errors import UsageError
from dmuon_tune.matrices import select
from dmuon_tune.models import load, presets


@pytest.mark.parametrize(
    ("name", "total"),  # parameter counts as huggingface.co shows them
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("llama-3-8b", 8_030_261_248),
        ("gpt2", 124_439_808),
    ],
)
def test_totals_are_the_published_ones(name: str, total: int) -> None:
    assert sum(prod(shape) for _, shape in presets.load(name).parameters) == total


def test_qwen_7b_has_the_matrices_of_28_layers() -> None:
    assert select(load("Qwen2.5-7B").parameters).counts() == {
        (3584, 3584): 56, (512, 3584): 56, (18944, 3584): 56, (3584, 18944): 28,
    }


def test_gpt2_keeps_its_matrices_as_stored() -> None:
    assert select(load("gpt2").parameters).counts() == {
        (768, 2304): 12, (768, 768): 12, (768, 3072): 12, (3072, 768): 12,
    }


def test_pi0_holds_vision_language_and_action_expert() -> None:
    selection = select(load("pi0").parameters)
    counts = selection.counts()
    assert counts[1152, 1152] == 27 * 4  # SigLIP So400m's attention
    assert counts[16384, 2048] == 18 * 2  # Gemma-2B's gate and up
    assert counts[4096, 1024] == 18 * 2  # the expert's
    assert {left.name: left.reason for left in selection.left_out}["action_out_proj.weight"] == "head"


def test_tiny_is_two_layers_of_width_64() -> None:
    assert select(load("tiny").parameters).counts() == {(64, 64): 8, (192, 64): 2, (64, 192): 2}


def test_tiny_is_the_model_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    assert load("tiny").parameters == load("tiny_model:TinyModel").parameters


def test_names_of_every_preset_are_unique() -> None:
    for name in presets.names():
        named = [parameter for parameter, _ in presets.load(name).parameters]
        assert len(named) == len(set(named))


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown preset 'qwen9'; choose one of qwen2.5-0.5b"):
        presets.load("qwen9")
    with pytest.raises(UsageError, match=r"neither a file here nor a preset \(qwen2.5-0.5b.*module:function"):
        load("qwen9")

"""Mixtures of experts: a matrix for each expert, under the names of published checkpoints, down to their totals."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.errors import UsageError
from dmuon_tune.matrices import select
from dmuon_tune.models import load_path
from dmuon_tune.models.architectures import ARCHITECTURES
from dmuon_tune.models.fields import MAX_EXPERTS, Fields

Named = dict[str, tuple[int, ...]]

DENSE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 10,
    "num_experts_per_tok": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 6}
ROUTED = {
    "moe_intermediate_size": 12, "n_routed_experts": 2, "n_shared_experts": 3, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
LATENT = {"q_lora_rank": 7, "kv_lora_rank": 5, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**DENSE, "num_key_value_heads": 2, "num_local_experts": 2},
    "qwen3_moe": {**DENSE, **GROUPED, "moe_intermediate_size": 12, "num_experts": 2},
    "deepseek_v2": {**DENSE, **ROUTED, **LATENT},
    "deepseek_v3": {**DENSE, **ROUTED, **LATENT},
    "kimi_k2": {**DENSE, **ROUTED, **LATENT},
    "glm4_moe": {**DENSE, **ROUTED, **GROUPED},
}


def parameters(model_type: str, **changed: Any) -> Named:
    """All of a config with some of its fields changed, or left out by ``...``."""
    fields = {name: value for name, value in {**CONFIGS[model_type], **changed}.items() if value is not ...}
    named = list(ARCHITECTURES[model_type](Fields(fields, "config.json")))
    assert len(named) == len(dict(named))
    return dict(named)


def part(named: Named, prefix: str) -> Named:
    return {name.removeprefix(prefix): shape for name, shape in named.items() if name.startswith(prefix)}


def layer(index: int, model_type: str, **changed: Any) -> Named:
    return part(parameters(model_type, **changed), f"model.layers.{index}.")


def gated(name: str, hidden: int, inner: int) -> Named:
    return {
        f"{name}.gate_proj.weight": (inner, hidden), f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def experts(name: str, count: int) -> Named:
    return {key: shape for index in range(count) for key, shape in gated(f"{name}.{index}", 32, 12).items()}


NORMS = {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}
OUTSIDE = {"model.embed_tokens.weight": (10, 32), "model.norm.weight": (32,), "lm_head.weight": (10, 32)}
LATENT_ATTENTION = {
    "self_attn.q_a_proj.weight": (7, 32), "self_attn.q_a_layernorm.weight": (7,), "self_attn.q_b_proj.weight": (32, 7),
    "self_attn.kv_a_proj_with_mqa.weight": (7, 32), "self_attn.kv_a_layernorm.weight": (5,),
    "self_attn.kv_b_proj.weight": (36, 5), "self_attn.o_proj.weight": (32, 12),
}
GROUPED_QUERY = {  # heads of 6
    "self_attn.q_proj.weight": (24, 32), "self_attn.k_proj.weight": (12, 32), "self_attn.v_proj.weight": (12, 32),
    "self_attn.o_proj.weight": (32, 24),
}
HEAD_NORMS = {"self_attn.q_norm.weight": (6,), "self_attn.k_norm.weight": (6,)}
CORRECTION = {"mlp.gate.e_score_correction_bias": (2,)}
ROUTED_MLP = {
    "mlp.gate.weight": (2, 32), **experts("mlp.experts", 2), **gated("mlp.shared_experts", 32, 36), **CORRECTION,
}


def test_deepseek_v3_is_dense_first_and_has_latent_attention() -> None:
    found = parameters("deepseek_v3")
    assert part(found, "model.layers.0.") == {**LATENT_ATTENTION, **gated("mlp", 32, 48), **NORMS}
    assert part(found, "model.layers.1.") == {**LATENT_ATTENTION, **ROUTED_MLP, **NORMS}
    assert {name: shape for name, shape in found.items() if ".layers." not in name} == OUTSIDE
    assert not part(found, "model.layers.2.")  # what predicts further tokens


def test_kimi_k2_is_laid_out_as_deepseek_v3_and_v2_has_no_correction() -> None:
    assert parameters("kimi_k2") == parameters("deepseek_v3")
    assert parameters("deepseek_v3") == {
        **parameters("deepseek_v2"), "model.layers.1.mlp.gate.e_score_correction_bias": (2,),
    }


def test_latent_attention_without_a_latent_of_queries_and_with_biases() -> None:
    whole = {"self_attn.q_proj.weight": (32, 32)}
    rest = {name: shape for name, shape in LATENT_ATTENTION.items() if not name.startswith("self_attn.q_")}
    assert layer(1, "deepseek_v3", q_lora_rank=None) == {**whole, **rest, **ROUTED_MLP, **NORMS}
    biases = {"self_attn.kv_a_proj_with_mqa.bias": (7,), "self_attn.o_proj.bias": (32,)}
    assert layer(1, "deepseek_v3", attention_bias=True) == {
        **LATENT_ATTENTION, "self_attn.q_a_proj.bias": (7,), **biases, **ROUTED_MLP, **NORMS,
    }
    assert layer(1, "deepseek_v3", attention_bias=True, q_lora_rank=None) == {
        **whole, **rest, **biases, **ROUTED_MLP, **NORMS,
    }


@pytest.mark.parametrize(
    ("changed", "routed"),
    [
        ({}, [1, 2, 3, 4, 5]), ({"first_k_dense_replace": 0}, [0, 1, 2, 3, 4, 5]), ({"first_k_dense_replace": 9}, []),
        ({"first_k_dense_replace": 3}, [3, 4, 5]), ({"moe_layer_freq": 2}, [2, 4]),
        ({"moe_layer_freq": 1}, [1, 2, 3, 4, 5]), ({"moe_layer_freq": 3, "first_k_dense_replace": 0}, [0, 3]),
    ],
)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_which_layers_have_experts(model_type: str, changed: dict[str, int], routed: list[int]) -> None:
    found = parameters(model_type, num_hidden_layers=6, **changed)
    assert [index for index in range(6) if f"model.layers.{index}.mlp.gate.weight" in found] == routed
    assert [index for index in range(6) if f"model.layers.{index}.mlp.gate_proj.weight" not in found] == routed


@pytest.mark.parametrize("shared", [0, None, ...])
def test_no_shared_experts(shared: Any) -> None:
    assert not [name for name in parameters("deepseek_v3", n_shared_experts=shared) if "shared" in name]


def test_qwen3_moe() -> None:
    routed = {"mlp.gate.weight": (2, 32), **experts("mlp.experts", 2)}
    found = parameters("qwen3_moe")
    for index in range(2):
        assert part(found, f"model.layers.{index}.") == {**GROUPED_QUERY, **HEAD_NORMS, **routed, **NORMS}
    assert {name: shape for name, shape in found.items() if ".layers." not in name} == OUTSIDE
    dense = layer(1, "qwen3_moe", mlp_only_layers=[1], attention_bias=True)
    biases = {name.replace("weight", "bias"): shape[:1] for name, shape in GROUPED_QUERY.items()}
    assert dense == {**GROUPED_QUERY, **biases, **HEAD_NORMS, **gated("mlp", 32, 48), **NORMS}
    assert layer(0, "qwen3_moe", head_dim=...)["self_attn.k_proj.weight"] == (16, 32)
    renamed = parameters("qwen3_moe", num_experts=..., num_local_experts=2)  # as transformers 5 saves it
    assert renamed == found


@pytest.mark.parametrize(
    ("step", "only", "routed"),
    [(1, [], [0, 1, 2, 3, 4]), (2, [], [1, 3]), (2, [3], [1]), (3, None, [2]), (1, [0, 4, 99], [1, 2, 3])],
)
def test_which_layers_of_qwen3_moe_have_experts(step: int, only: list[int] | None, routed: list[int]) -> None:
    found = parameters("qwen3_moe", num_hidden_layers=5, decoder_sparse_step=step, mlp_only_layers=only)
    assert [index for index in range(5) if f"model.layers.{index}.mlp.gate.weight" in found] == routed


def test_glm4_moe() -> None:
    assert layer(1, "glm4_moe") == {**GROUPED_QUERY, **ROUTED_MLP, **NORMS}
    biases = {"self_attn.q_proj.bias": (24,), "self_attn.k_proj.bias": (12,), "self_attn.v_proj.bias": (12,)}
    assert layer(0, "glm4_moe", attention_bias=True, use_qk_norm=True) == {
        **GROUPED_QUERY, **biases, **HEAD_NORMS, **gated("mlp", 32, 48), **NORMS,
    }


@pytest.mark.parametrize("head_dim", [None, 8, ...])
def test_mixtral(head_dim: Any) -> None:
    assert layer(1, "mixtral", head_dim=head_dim) == {
        "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32), "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32), "block_sparse_moe.gate.weight": (2, 32),
        "block_sparse_moe.experts.0.w1.weight": (48, 32), "block_sparse_moe.experts.0.w2.weight": (32, 48),
        "block_sparse_moe.experts.0.w3.weight": (48, 32), "block_sparse_moe.experts.1.w1.weight": (48, 32),
        "block_sparse_moe.experts.1.w2.weight": (32, 48), "block_sparse_moe.experts.1.w3.weight": (48, 32), **NORMS,
    }


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_tied_head_is_the_embedding(model_type: str) -> None:
    named = parameters(model_type)
    assert parameters(model_type, tie_word_embeddings=True) == {
        name: shape for name, shape in named.items() if name != "lm_head.weight"
    }


def test_experts_and_routers_are_matrices_and_their_norms_and_corrections_are_not() -> None:
    reasons = {left.name: left.reason for left in select(parameters("deepseek_v3").items()).left_out}
    assert {name.split(".", 3)[-1]: reason for name, reason in reasons.items() if ".layers.1." in name} == {
        "self_attn.q_a_layernorm.weight": "norm", "self_attn.kv_a_layernorm.weight": "norm",
        "mlp.gate.e_score_correction_bias": "bias", "input_layernorm.weight": "norm",
        "post_attention_layernorm.weight": "norm",
    }


def deepseek(
    hidden: int, inner: int, expert: int, layers: int, heads: int, q_rank: int | None, routed: int, shared: int,
    first_dense: int, vocab: int,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": expert,
        "num_hidden_layers": layers, "num_attention_heads": heads, "q_lora_rank": q_rank, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": routed,
        "n_shared_experts": shared, "first_k_dense_replace": first_dense, "vocab_size": vocab,
    }


def grouped(
    hidden: int, inner: int, expert: int, layers: int, heads: int, kv_heads: int, vocab: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": expert, "head_dim": 128,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocab, **others,
    }


AIR = {"n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True}
GLM = {**AIR, "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True}


@pytest.mark.parametrize(
    ("model_type", "config", "total"),  # DeepSeek-V3 and GLM-4.5 without the layer that predicts a further token
    [
        ("deepseek_v3", deepseek(7168, 18432, 2048, 61, 128, 1536, 256, 1, 3, 129280), 671_026_419_200),
        ("deepseek_v3", deepseek(2048, 11264, 1408, 27, 16, None, 64, 2, 1, 163840), 15_960_110_208),  # Moonlight
        ("kimi_k2", deepseek(7168, 18432, 2048, 61, 64, 1536, 384, 1, 1, 163840), 1_026_408_232_448),
        ("deepseek_v2", deepseek(5120, 12288, 1536, 60, 128, 1536, 160, 2, 1, 102400), 235_741_434_880),
        ("deepseek_v2", deepseek(2048, 10944, 1408, 27, 16, None, 64, 2, 1, 102400), 15_706_484_224),  # Lite
        ("qwen3_moe", grouped(2048, 6144, 768, 48, 32, 4, 151936, num_experts=128), 30_532_122_624),
        ("qwen3_moe", grouped(4096, 12288, 1536, 94, 64, 4, 151936, num_experts=128), 235_093_634_560),
        ("glm4_moe", grouped(4096, 10944, 1408, 46, 96, 8, 151552, **AIR), 106_852_251_264),  # Air
        ("glm4_moe", grouped(5120, 12288, 1536, 92, 96, 8, 151552, **GLM), 352_797_829_024),
        ("mixtral", grouped(4096, 14336, 0, 32, 32, 8, 32000, num_local_experts=8), 46_702_792_704),  # 8x7B
        ("mixtral", grouped(6144, 16384, 0, 56, 48, 8, 32768, num_local_experts=8), 140_630_071_296),  # 8x22B
    ],
)
def test_totals_are_the_published_ones(model_type: str, config: dict[str, Any], total: int) -> None:
    assert sum(prod(shape) for _, shape in ARCHITECTURES[model_type](Fields(config, "config.json"))) == total


def refused(path: Path, model_type: str, said: str, **changed: Any) -> None:
    fields = {name: value for name, value in {**CONFIGS[model_type], **changed}.items() if value is not ...}
    path.write_text(json.dumps({"model_type": model_type, **fields}))
    with pytest.raises(UsageError, match=said) as caught:
        load_path(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300 and path.name in str(caught.value)


COUNTS = {"first_k_dense_replace", "n_shared_experts"}  # which may be 0
OPTIONAL = {"num_key_value_heads", "head_dim", "n_shared_experts", "num_experts_per_tok"}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_numbers_that_are_none(tmp_path: Path, model_type: str) -> None:
    for field in CONFIGS[model_type].keys() - {"num_nextn_predict_layers"}:
        must_be = f"field '{field}' must be an? .*integer"
        for value in ("2", 2.0, True, [2], {"a": 2}, -1, *([] if field in COUNTS else [0])):
            refused(tmp_path / "config.json", model_type, must_be, **{field: value})
        refused(tmp_path / "config.json", model_type, f"field '{field}' is too large", **{field: 10**9})
        if field not in OPTIONAL:
            refused(tmp_path / "config.json", model_type, f"field '{field}' is missing", **{field: ...})
            if field != "q_lora_rank":
                refused(tmp_path / "config.json", model_type, f"field '{field}' is null", **{field: None})


def test_other_fields_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for only in ("1", 1, True, {"1": 1}, [1.0], ["1"], [True], [-1], [None]):
        refused(path, "qwen3_moe", "field 'mlp_only_layers' must be a list of layers", mlp_only_layers=only)
    for value in (0, [0, 1], "1", -1):
        refused(path, "qwen3_moe", "field 'decoder_sparse_step' must be a positive", decoder_sparse_step=value)
        refused(path, "deepseek_v3", "field 'moe_layer_freq' must be a positive", moe_layer_freq=value)
    refused(path, "glm4_moe", "field 'use_qk_norm' must be true or false", use_qk_norm=1)
    for model_type in CONFIGS:
        refused(path, model_type, "field 'num_experts_per_tok' is too large: 3, at most 2", num_experts_per_tok=3)


def test_experts_of_all_layers_are_bounded(tmp_path: Path) -> None:
    for model_type, field in (("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts")):
        said = f"field '{field}' is too large: 1025, at most 1024"
        refused(tmp_path / "config.json", model_type, said, num_hidden_layers=MAX_EXPERTS // 1024, **{field: 1025})
    refused(tmp_path / "config.json", "kimi_k2", "'n_routed_experts' is too large", n_routed_experts=MAX_EXPERTS)

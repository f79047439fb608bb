"""The rule that divides a model's parameters into hidden matrices and the rest."""

from __future__ import annotations

import pytest

from dmuon_tune.matrices import Matrix, select, unmatched


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.embed_tokens.weight", (100, 8), "embedding"),
        ("transformer.wte.weight", (100, 8), "embedding"),
        ("embeddings.word_embeddings.weight", (100, 8), "embedding"),
        ("vision_model.embeddings.patch_embedding.weight", (8, 3, 14, 14), "embedding"),
        ("pos_embed", (1, 5, 6), "embedding"),
        ("tok_embeddings.weight", (100, 8), "embedding"),
        ("module.wte.weight", (100, 8), "embedding"),
        ("lm_head.weight", (100, 8), "head"),
        ("output.weight", (100, 8), "head"),
        ("_orig_mod.output.weight", (100, 8), "head"),
        ("score.weight", (2, 8), "head"),
        ("model.layers.0.input_layernorm.weight", (8,), "norm"),
        ("transformer.h.0.ln_1.weight", (8,), "norm"),
        ("layers.0.q_norm.weight", (4, 8), "norm"),
        ("layers.0.q_proj.bias", (8,), "bias"),
        ("h.0.attn.bias", (1, 1, 8, 8), "bias"),
        ("experts.gate_up_proj_bias", (4, 8), "bias"),
        ("mixer.conv1d.weight", (8, 2, 4), "convolution"),
        ("mlp.up.weight_scale_inv", (4, 4), "quantization scale"),
        ("mixer.A_log", (8,), "vector"),
        ("temperature", (), "scalar"),
        ("gate.weight", (1, 8), "vector: one side is 1"),
        ("stem.weight", (8, 3, 3, 3), "4-D tensor, not a matrix"),
        ("unused.weight", (0, 8), "empty"),
    ],
)
def test_left_out_with_its_reason(name: str, shape: tuple[int, ...], reason: str) -> None:
    selection = select([(name, shape)])
    assert selection.matrices == ()
    assert [(left.name, left.shape, left.reason) for left in selection.left_out] == [(name, shape, reason)]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "encoder.layer.0.attention.output.dense.weight",
        "layers.0.multihead.weight",
        "model.embedder_free.layers.0.up.weight",
        "0.weight",
        "weight",
        "module",
    ],
)
def test_hidden_matrices_are_kept(name: str) -> None:
    assert select([(name, (4, 6))]).matrices == (Matrix(name, 4, 6),)


def test_a_tensor_of_experts_counts_as_that_many_matrices() -> None:
    selection = select([("mlp.experts.down_proj", (4, 8, 6)), ("mlp.up.weight", (8, 6))])
    assert selection.matrices[0] == Matrix("mlp.experts.down_proj", 8, 6, 4)
    assert selection.counts() == {(8, 6): 5}
    assert selection.shapes() == [(8, 6)] * 5


def test_patterns_override_the_rule_and_exclude_wins() -> None:
    parameters = [("lm_head.weight", (9, 8)), ("layers.0.q.weight", (8, 8)), ("layers.1.q.weight", (8, 8))]
    selection = select(parameters, include=["lm_head*", "layers.1*"], exclude=["layers.1.*"])
    assert [matrix.name for matrix in selection.matrices] == ["lm_head.weight", "layers.0.q.weight"]
    assert [left.reason for left in selection.left_out] == ["excluded by 'layers.1.*'"]


def test_what_is_no_matrix_cannot_be_included() -> None:
    selection = select([("norm.weight", (8,)), ("stem.weight", (8, 3, 3, 3))], include=["*"])
    assert selection.matrices == ()
    assert all(left.reason.endswith("cannot be included") for left in selection.left_out)


def test_unmatched_names_the_patterns_without_effect() -> None:
    assert unmatched(["*.q.*", "*.qq.*"], ["layers.0.q.weight"]) == ["*.qq.*"]

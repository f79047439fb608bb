"""Mixtures of experts and latent attention, a matrix for each expert, as published checkpoints store them.

Layers behind the last that predict further tokens (``num_nextn_predict_layers``) are left out, as transformers does.
"""

from __future__ import annotations

from .decoder import GATED, Parameters, gated, grouped_query, linear
from .fields import Fields


def latent_attention(fields: Fields, name: str) -> Parameters:
    """DeepSeek's: keys and values through one narrow latent, queries through another where ``q_lora_rank`` is given."""
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    unrotated, rotated = fields.positive("qk_nope_head_dim"), fields.positive("qk_rope_head_dim")
    value, kv_rank = fields.positive("v_head_dim"), fields.positive("kv_lora_rank")
    bias, queries = fields.flag("attention_bias", False), heads * (unrotated + rotated)
    if fields.is_null("q_lora_rank"):
        yield from linear(f"{name}.q_proj", queries, hidden, False)
    else:
        q_rank = fields.positive("q_lora_rank")
        yield from linear(f"{name}.q_a_proj", q_rank, hidden, bias)
        yield f"{name}.q_a_layernorm.weight", (q_rank,)
        yield from linear(f"{name}.q_b_proj", queries, q_rank, False)
    yield from linear(f"{name}.kv_a_proj_with_mqa", kv_rank + rotated, hidden, bias)
    yield f"{name}.kv_a_layernorm.weight", (kv_rank,)
    yield from linear(f"{name}.kv_b_proj", heads * (unrotated + value), kv_rank, False)
    yield from linear(f"{name}.o_proj", hidden, heads * value, bias)


def glm4_attention(fields: Fields, name: str) -> Parameters:
    """GLM-4.5's: no bias behind the heads, norms on them where the config says so."""
    qkv_bias, head_norms = fields.flag("attention_bias", False), fields.flag("use_qk_norm", False)
    yield from grouped_query(fields, name, qkv_bias=qkv_bias, head_norms=head_norms)


def routed(
    name: str, experts: int, hidden: int, inner: int, names: tuple[str, str, str] = GATED
) -> Parameters:
    """A router, which has a row for each expert, and the experts, each a gated MLP."""
    yield f"{name}.gate.weight", (experts, hidden)
    for expert in range(experts):
        yield from gated(f"{name}.experts.{expert}", hidden, inner, names=names)


def deepseek_mlp(fields: Fields, layer: str, index: int, corrected: bool = True) -> Parameters:
    """Experts beside some that every token takes, from layer ``first_k_dense_replace`` on; ``corrected``: the router's
    scores have a bias that balances them."""
    name, hidden = f"{layer}.mlp", fields.positive("hidden_size")
    dense_inner, inner = fields.positive("intermediate_size"), fields.positive("moe_intermediate_size")
    experts, shared = fields.experts("n_routed_experts"), fields.count("n_shared_experts", 0)
    if index < fields.count("first_k_dense_replace") or index % fields.positive("moe_layer_freq", 1):
        yield from gated(name, hidden, dense_inner)
        return
    yield from routed(name, experts, hidden, inner)
    if corrected:
        yield f"{name}.gate.e_score_correction_bias", (experts,)
    if shared:  # one MLP, as wide as they are together
        yield from gated(f"{name}.shared_experts", hidden, shared * inner)


def qwen3_mlp(fields: Fields, layer: str, index: int) -> Parameters:
    """Experts in every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""
    name, hidden = f"{layer}.mlp", fields.positive("hidden_size")
    dense_inner, inner = fields.positive("intermediate_size"), fields.positive("moe_intermediate_size")
    saved_by_5 = "num_local_experts" in fields.values  # transformers 5 writes this name
    experts = fields.experts("num_local_experts" if saved_by_5 else "num_experts")
    if index in fields.indices("mlp_only_layers") or (index + 1) % fields.positive("decoder_sparse_step", 1):
        yield from gated(name, hidden, dense_inner)
    else:
        yield from routed(name, experts, hidden, inner)


def mixtral_mlp(fields: Fields, layer: str, index: int) -> Parameters:
    """Experts in every layer, as wide as ``intermediate_size``."""
    hidden, inner = fields.positive("hidden_size"), fields.positive("intermediate_size")
    names = ("w1", "w3", "w2")
    yield from routed(f"{layer}.block_sparse_moe", fields.experts("num_local_experts"), hidden, inner, names)

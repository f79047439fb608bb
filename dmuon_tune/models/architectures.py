"""From an architecture's numbers to its parameters' names and shapes, as Hugging Face names and stores them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import experts
from .decoder import Parameters, causal_lm, decoder, grouped_query, linear
from .fields import Fields

# GemmaConfig's default head_dim, wider than hidden_size / num_attention_heads in Gemma-7B.
gemma_attention = partial(grouped_query, head_dim=256)


def gpt2(fields: Fields) -> Parameters:
    """GPT-2: its Conv1D modules store (inputs, outputs), and q, k and v are one matrix."""
    width = fields.positive("n_embd")
    inner = fields.positive("n_inner", 4 * width)
    yield "transformer.wte.weight", (fields.positive("vocab_size"), width)
    yield "transformer.wpe.weight", (fields.positive("n_positions"), width)
    for index in range(fields.layers("n_layer")):
        layer = f"transformer.h.{index}"
        for name, inputs, outputs in (
            ("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width),
            ("mlp.c_fc", width, inner), ("mlp.c_proj", inner, width),
        ):
            yield f"{layer}.{name}.weight", (inputs, outputs)
            yield f"{layer}.{name}.bias", (outputs,)
        yield from _layer_norm(f"{layer}.ln_1", width)
        yield from _layer_norm(f"{layer}.ln_2", width)
    yield from _layer_norm("transformer.ln_f", width)
    if not fields.flag("tie_word_embeddings", True):
        yield "lm_head.weight", (fields.positive("vocab_size"), width)


def siglip_tower(fields: Fields, prefix: str) -> Parameters:
    """SigLIP's vision transformer without its pooling head, as PaliGemma uses it."""
    width = fields.positive("hidden_size")
    inner = fields.positive("intermediate_size")
    patch = fields.positive("patch_size", 14)
    channels = fields.positive("num_channels", 3)
    patches = (fields.positive("image_size", 224) // patch) ** 2
    yield f"{prefix}embeddings.patch_embedding.weight", (width, channels, patch, patch)
    yield f"{prefix}embeddings.patch_embedding.bias", (width,)
    yield f"{prefix}embeddings.position_embedding.weight", (patches, width)
    for index in range(fields.layers("num_hidden_layers")):
        layer = f"{prefix}encoder.layers.{index}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from linear(f"{layer}.self_attn.{name}", width, width, True)
        yield from _layer_norm(f"{layer}.layer_norm1", width)
        yield from linear(f"{layer}.mlp.fc1", inner, width, True)
        yield from linear(f"{layer}.mlp.fc2", width, inner, True)
        yield from _layer_norm(f"{layer}.layer_norm2", width)
    yield from _layer_norm(f"{prefix}post_layernorm", width)


def paligemma(fields: Fields) -> Parameters:
    """PaliGemma: SigLIP, a projector, and a Gemma decoder whose head is its embedding."""
    text, vision = fields.section("text_config"), fields.section("vision_config")
    yield from siglip_tower(vision, "model.vision_tower.vision_model.")
    yield from linear(
        "model.multi_modal_projector.linear", text.positive("hidden_size"), vision.positive("hidden_size"), True
    )
    yield from decoder(text, "model.language_model.", gemma_attention)


def pi0(fields: Fields) -> Parameters:
    """π0 as openpi's PyTorch port names it: PaliGemma, a Gemma action expert, and the action's projections."""
    expert = fields.section("expert_config")
    width, action_dim = expert.positive("hidden_size"), fields.positive("action_dim")
    for name, shape in paligemma(fields):
        yield f"paligemma_with_expert.paligemma.{name}", shape
    yield from decoder(expert, "paligemma_with_expert.gemma_expert.model.", gemma_attention, embedded=False)
    yield "paligemma_with_expert.gemma_expert.lm_head.weight", (expert.positive("vocab_size"), width)
    yield from linear("action_in_proj", width, action_dim, True)
    yield from linear("action_out_proj", action_dim, width, True)
    yield from linear("state_proj", width, action_dim, True)
    yield from linear("action_time_mlp_in", width, 2 * width, True)
    yield from linear("action_time_mlp_out", width, width, True)


def _layer_norm(name: str, width: int) -> Parameters:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


# model_type of a Hugging Face config → its parameters.
ARCHITECTURES: dict[str, Callable[[Fields], Parameters]] = {
    "llama": causal_lm(),
    "mistral": causal_lm(),
    "mixtral": causal_lm(partial(grouped_query, qkv_bias=False), experts.mixtral_mlp),
    "qwen2": causal_lm(partial(grouped_query, qkv_bias=True)),
    "qwen3": causal_lm(partial(grouped_query, head_norms=True, head_dim=128)),
    "qwen3_moe": causal_lm(partial(grouped_query, head_norms=True), experts.qwen3_mlp),
    "deepseek_v2": causal_lm(experts.latent_attention, partial(experts.deepseek_mlp, corrected=False)),
    "deepseek_v3": causal_lm(experts.latent_attention, experts.deepseek_mlp),
    "kimi_k2": causal_lm(experts.latent_attention, experts.deepseek_mlp),
    "glm4_moe": causal_lm(experts.glm4_attention, experts.deepseek_mlp),
    "gemma": causal_lm(gemma_attention, tied=True),
    "gpt2": gpt2,
    "paligemma": paligemma,
}

"""From an architecture's numbers to its parameters' names and shapes, as Hugging Face names and stores them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from typing import Any

from dmuon_tune.errors import UsageError

Parameters = Iterator[tuple[str, tuple[int, ...]]]

MAX_EXTENT = 2**24  # of one field: the largest vocabulary published has under 2**20
MAX_LAYERS = 4096


class Fields:
    """A config's fields, read with errors that name the field and the file they were missing in."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def positive(self, name: str, default: int | None = None, at_most: int = MAX_EXTENT) -> int:
        """A positive integer, ``at_most`` that large; ``default`` where the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise UsageError(f"{self.where}: field {name!r} is {'null' if name in self.values else 'missing'}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{self.where}: field {name!r} must be a positive integer, not {reprlib.repr(value)}")
        if value > at_most:
            raise UsageError(f"{self.where}: field {name!r} is too large: {reprlib.repr(value)}, at most {at_most}")
        return value

    def layers(self, name: str) -> int:
        """The number of layers, each of which is listed."""
        return self.positive(name, at_most=MAX_LAYERS)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UsageError(f"{self.where}: field {name!r} must be true or false, not {reprlib.repr(value)}")
        return value

    def section(self, name: str) -> Fields:
        value = self.values.get(name)
        if value is None:
            raise UsageError(f"{self.where}: section {name!r} is missing")
        if not isinstance(value, dict):
            raise UsageError(f"{self.where}: section {name!r} must be an object, not {reprlib.repr(value)}")
        return Fields(value, f"{self.where}: {name}")


def linear(name: str, rows: int, cols: int, bias: bool) -> Parameters:
    """A torch.nn.Linear of ``cols`` inputs and ``rows`` outputs, stored (rows, cols)."""
    yield f"{name}.weight", (rows, cols)
    if bias:
        yield f"{name}.bias", (rows,)


def decoder(
    fields: Fields,
    prefix: str = "model.",
    qkv_bias: bool | None = None,
    head_norms: bool = False,
    head_dim: int | None = None,
    embedded: bool = True,
) -> Parameters:
    """The Llama family's body: grouped-query attention, gated MLP, RMS norms.

    ``qkv_bias`` None: as the config's ``attention_bias`` says (then o_proj has one too). ``head_norms``: norms on the
    heads' queries and keys. ``head_dim``: where the config has none, instead of hidden_size / num_attention_heads.
    """
    hidden = fields.positive("hidden_size")
    inner = fields.positive("intermediate_size")
    heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", heads)
    width = fields.positive("head_dim", head_dim or max(1, hidden // heads))
    attention_bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    if embedded:
        yield f"{prefix}embed_tokens.weight", (fields.positive("vocab_size"), hidden)
    for index in range(fields.layers("num_hidden_layers")):
        layer = f"{prefix}layers.{index}"
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            bias = attention_bias if qkv_bias is None else qkv_bias
            yield from linear(f"{layer}.self_attn.{name}_proj", rows * width, hidden, bias)
        yield from linear(f"{layer}.self_attn.o_proj", hidden, heads * width, attention_bias and qkv_bias is None)
        if head_norms:
            yield f"{layer}.self_attn.q_norm.weight", (width,)
            yield f"{layer}.self_attn.k_norm.weight", (width,)
        yield from linear(f"{layer}.mlp.gate_proj", inner, hidden, mlp_bias)
        yield from linear(f"{layer}.mlp.up_proj", inner, hidden, mlp_bias)
        yield from linear(f"{layer}.mlp.down_proj", hidden, inner, mlp_bias)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield f"{prefix}norm.weight", (hidden,)


def causal_lm(tied: bool = False, **options: Any) -> Callable[[Fields], Parameters]:
    """A decoder with its head; ``tied`` where the config doesn't say whether the head is the embedding."""

    def parameters(fields: Fields) -> Parameters:
        yield from decoder(fields, **options)
        if not fields.flag("tie_word_embeddings", tied):
            yield "lm_head.weight", (fields.positive("vocab_size"), fields.positive("hidden_size"))

    return parameters


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
    yield from decoder(text, "model.language_model.", head_dim=GEMMA_HEAD_DIM)


def pi0(fields: Fields) -> Parameters:
    """π0 as openpi's PyTorch port names it: PaliGemma, a Gemma action expert, and the action's projections."""
    expert = fields.section("expert_config")
    width, action_dim = expert.positive("hidden_size"), fields.positive("action_dim")
    for name, shape in paligemma(fields):
        yield f"paligemma_with_expert.paligemma.{name}", shape
    yield from decoder(
        expert, "paligemma_with_expert.gemma_expert.model.", head_dim=GEMMA_HEAD_DIM, embedded=False
    )
    yield "paligemma_with_expert.gemma_expert.lm_head.weight", (expert.positive("vocab_size"), width)
    yield from linear("action_in_proj", width, action_dim, True)
    yield from linear("action_out_proj", action_dim, width, True)
    yield from linear("state_proj", width, action_dim, True)
    yield from linear("action_time_mlp_in", width, 2 * width, True)
    yield from linear("action_time_mlp_out", width, width, True)


def _layer_norm(name: str, width: int) -> Parameters:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


GEMMA_HEAD_DIM = 256  # GemmaConfig's default, wider than hidden_size / num_attention_heads in Gemma-7B

# model_type of a Hugging Face config → its parameters.
ARCHITECTURES: dict[str, Callable[[Fields], Parameters]] = {
    "llama": causal_lm(),
    "mistral": causal_lm(),
    "qwen2": causal_lm(qkv_bias=True),
    "qwen3": causal_lm(head_norms=True, head_dim=128),
    "gemma": causal_lm(tied=True, head_dim=GEMMA_HEAD_DIM),
    "gpt2": gpt2,
    "paligemma": paligemma,
}

"""The Llama family's decoder, in parts: what has another attention or MLP puts its own in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .fields import Fields

Parameters = Iterator[tuple[str, tuple[int, ...]]]
Attention = Callable[[Fields, str], Parameters]  # of the module that is named
Mlp = Callable[[Fields, str, int], Parameters]  # of the layer that is named, and its index

GATED = ("gate_proj", "up_proj", "down_proj")


def linear(name: str, rows: int, cols: int, bias: bool) -> Parameters:
    """A torch.nn.Linear of ``cols`` inputs and ``rows`` outputs, stored (rows, cols)."""
    yield f"{name}.weight", (rows, cols)
    if bias:
        yield f"{name}.bias", (rows,)


def grouped_query(
    fields: Fields, name: str, qkv_bias: bool | None = None, head_norms: bool = False, head_dim: int | None = None
) -> Parameters:
    """Grouped-query attention.

    ``qkv_bias`` None: as the config's ``attention_bias`` says (then o_proj has one too). ``head_norms``: norms on the
    heads' queries and keys. ``head_dim``: where the config has none, instead of hidden_size / num_attention_heads.
    """
    hidden = fields.positive("hidden_size")
    heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", heads)
    width = fields.positive("head_dim", head_dim or max(1, hidden // heads))
    attention_bias = fields.flag("attention_bias", False)
    for each, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield from linear(f"{name}.{each}_proj", rows * width, hidden, attention_bias if qkv_bias is None else qkv_bias)
    yield from linear(f"{name}.o_proj", hidden, heads * width, attention_bias and qkv_bias is None)
    if head_norms:
        yield f"{name}.q_norm.weight", (width,)
        yield f"{name}.k_norm.weight", (width,)


def gated(
    name: str, hidden: int, inner: int, bias: bool = False, names: tuple[str, str, str] = GATED
) -> Parameters:
    """A gated MLP; ``names`` of its gate, of what it gates, and of the way back."""
    gate, up, down = names
    yield from linear(f"{name}.{gate}", inner, hidden, bias)
    yield from linear(f"{name}.{up}", inner, hidden, bias)
    yield from linear(f"{name}.{down}", hidden, inner, bias)


def dense(fields: Fields, layer: str, index: int) -> Parameters:
    """The MLP that every layer of a dense model has."""
    hidden, inner = fields.positive("hidden_size"), fields.positive("intermediate_size")
    yield from gated(f"{layer}.mlp", hidden, inner, fields.flag("mlp_bias", False))


def decoder(
    fields: Fields,
    prefix: str = "model.",
    attention: Attention = grouped_query,
    mlp: Mlp = dense,
    embedded: bool = True,
) -> Parameters:
    """The body: in each layer attention and an MLP, RMS norms before them and at the end."""
    hidden = fields.positive("hidden_size")
    if embedded:
        yield f"{prefix}embed_tokens.weight", (fields.positive("vocab_size"), hidden)
    for index in range(fields.layers("num_hidden_layers")):
        layer = f"{prefix}layers.{index}"
        yield from attention(fields, f"{layer}.self_attn")
        yield from mlp(fields, layer, index)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield f"{prefix}norm.weight", (hidden,)


def causal_lm(
    attention: Attention = grouped_query, mlp: Mlp = dense, tied: bool = False
) -> Callable[[Fields], Parameters]:
    """A decoder with its head; ``tied`` where the config doesn't say whether the head is the embedding."""

    def parameters(fields: Fields) -> Parameters:
        yield from decoder(fields, attention=attention, mlp=mlp)
        if not fields.flag("tie_word_embeddings", tied):
            yield "lm_head.weight", (fields.positive("vocab_size"), fields.positive("hidden_size"))

    return parameters

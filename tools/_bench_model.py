"""The decoder that bench_train trains: a preset's numbers as a Llama-like model, sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from dmuon_tune.errors import UsageError
from dmuon_tune.models import presets
from dmuon_tune.runtime import dedicate
from dmuon_tune.words import counted

ROPE_BASE = 1e6  # Qwen2.5's config.json
INIT_STD = 0.02
LOSS_TOKENS = 4096  # at a time: logits of a whole batch would take more memory than all layers
RECOMPUTED: dict[str, bool] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here is random
RECOMPUTED_PARAMETERS = 3e9  # from there on blocks are recomputed in the backward unless asked otherwise


@dataclass(frozen=True)
class Numbers:
    """A decoder's extents; ``bias``: of q, k and v; ``tied``: the head is the embedding; ``gated``: SwiGLU."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    bias: bool
    tied: bool
    gated: bool

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Elements of all weight matrices."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_width
        layer = attention + (3 if self.gated else 2) * self.hidden * self.inner
        return self.layers * layer + (1 if self.tied else 2) * self.vocabulary * self.hidden


def trainable() -> tuple[str, ...]:
    """The presets that are decoders of this form."""
    return tuple(name for name, config in presets.CONFIGS.items() if config["model_type"] in ("qwen2", "llama", "tiny"))


def numbers_of(preset: str, layers: int | None = None) -> Numbers:
    """A preset's extents, with fewer ``layers`` where asked; ``tiny`` says nothing of heads: 4.

    UsageError for a preset of another architecture, or with fewer layers.
    """
    if preset not in trainable():
        raise UsageError(f"--preset {preset!r} is no model that this trains; choose among {', '.join(trainable())}")
    config = presets.CONFIGS[preset]
    kind, heads = config["model_type"], config.get("num_attention_heads", 4)
    most = config.get("num_hidden_layers") or config["num_layers"]
    if layers is not None and layers > most:
        raise UsageError(f"--layers {layers}: {preset} has {counted(most, 'layer')}; give at most that")
    return Numbers(
        config["hidden_size"], config["intermediate_size"], layers or most,
        heads, config.get("num_key_value_heads", heads), config["vocab_size"],
        kind == "qwen2", config.get("tie_word_embeddings", False), kind != "tiny",
    )


class Attention(nn.Module):
    """Causal, several heads of queries to one of keys and values."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self.width = numbers.head_width
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(numbers.hidden, heads * self.width, bias=numbers.bias)
            for heads in (numbers.heads, numbers.kv_heads, numbers.kv_heads)
        )
        self.o_proj = nn.Linear(numbers.heads * self.width, numbers.hidden, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for project in projections)
        q, k = rotated(q, rotation), rotated(k, rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class Mlp(nn.Module):
    """SwiGLU, or SiLU alone."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(numbers.hidden, numbers.inner, bias=False) if numbers.gated else None
        self.up_proj = nn.Linear(numbers.hidden, numbers.inner, bias=False)
        self.down_proj = nn.Linear(numbers.inner, numbers.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        inner = F.silu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up
        out: Tensor = self.down_proj(inner)
        return out


class Block(nn.Module):
    """Attention and MLP, each on normalized input; ``recompute``: nothing but its input is kept for the backward."""

    def __init__(self, numbers: Numbers, recompute: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(numbers.hidden, eps=1e-6) for _ in range(2))
        self.self_attn, self.mlp = Attention(numbers), Mlp(numbers)
        self.recompute = recompute
        self.body: Callable[[Tensor, Tensor], Tensor] = self._body  # or that compiled

    def _body(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        if not self.recompute:
            return self.body(x, rotation)
        out: Tensor = checkpoint(self.body, x, rotation, **RECOMPUTED)
        return out


class Decoder(nn.Module):
    """Mean cross-entropy of each next token, of (batch, length + 1) tokens."""

    def __init__(self, numbers: Numbers, recompute: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(numbers.vocabulary, numbers.hidden)
        self.layers = nn.ModuleList(Block(numbers, recompute) for _ in range(numbers.layers))
        self.norm = nn.RMSNorm(numbers.hidden, eps=1e-6)
        self.lm_head = None if numbers.tied else nn.Linear(numbers.hidden, numbers.vocabulary, bias=False)
        self.width = numbers.head_width
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        rotation = rotation_of(x.shape[1], self.width, x)
        for block in self.layers:
            x = block(x, rotation)
        states, targets = self.norm(x).flatten(0, 1), tokens[:, 1:].flatten()
        parts = zip(states.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), strict=True)
        losses = [checkpoint(self._loss, *part, **RECOMPUTED) for part in parts]
        return torch.stack(losses).sum() / len(targets)

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        weight = (self.embed_tokens if self.lm_head is None else self.lm_head).weight
        return F.cross_entropy(F.linear(states, weight).float(), targets, reduction="sum")


def rotation_of(length: int, width: int, like: Tensor) -> Tensor:
    """(2, length, width): cosines and sines of RoPE, in the dtype of ``like``."""
    pair = torch.arange(width // 2, device=like.device) * (2 / width)
    angle = torch.arange(length, device=like.device)[:, None] * ROPE_BASE**-pair
    return torch.stack((angle.cos(), angle.sin())).repeat(1, 1, 2).to(like.dtype)


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat((-second, first), dim=-1) * rotation[1]


def sharded(
    numbers: Numbers, mesh: DeviceMesh, device: torch.device, seed: int, recompute: bool, dedicated: bool
) -> Decoder:
    """The model of a seed, each block and the rest a group of FSDP2: fp32 shards, bf16 compute, gradients summed in
    fp32. ``dedicated``: all of its matrices have owners, and what is left is one group."""
    torch.manual_seed(seed)  # every rank makes the whole model and keeps its shards
    with torch.device(device):
        model = Decoder(numbers, recompute)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    owned = dedicate(model, mesh, **dtypes) if dedicated else None
    policy = MixedPrecisionPolicy(**dtypes)
    for part in (model,) if dedicated else (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=owned)
    return model

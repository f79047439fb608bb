"""Built-in models: each is the numbers of its published config, turned into parameters as any config is."""

from __future__ import annotations

from typing import Any

from dmuon_tune.errors import UsageError

from . import ModelShapes
from .architectures import ARCHITECTURES, pi0
from .decoder import Parameters
from .fields import Fields


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def _gemma(hidden: int, inner: int) -> dict[str, Any]:
    # Gemma-2B and the action expert beside it share depth, heads and PaliGemma's vocabulary (openpi, gemma.py).
    return {
        "model_type": "gemma", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 257152,
    }


# From each model's config.json on huggingface.co; pi0 from openpi's gemma.py and siglip.py (So400m/14, 224 px).
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064, False),
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
    "pi0": {
        "model_type": "pi0", "action_dim": 32, "text_config": _gemma(2048, 16384),
        "expert_config": _gemma(1024, 4096),
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
    },
    "tiny": {"model_type": "tiny", "hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "vocab_size": 256},
}


def _tiny(fields: Fields) -> Parameters:
    # The model that examples/ trains on the CPU.
    width, inner, vocab = (fields.positive(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    yield "embedding.weight", (vocab, width)
    for index in range(fields.layers("num_layers")):
        for name in "qkvo":
            yield f"layers.{index}.{name}.weight", (width, width)
        yield f"layers.{index}.up.weight", (inner, width)
        yield f"layers.{index}.down.weight", (width, inner)
    yield "head.weight", (vocab, width)


def names() -> tuple[str, ...]:
    return tuple(CONFIGS)


def load(name: str) -> ModelShapes:
    """The parameters of a built-in model; UsageError lists the names where there is none."""
    config = CONFIGS.get(name.lower())
    if config is None:
        raise UsageError(f"unknown preset {name!r}; choose one of {', '.join(names())}, or give --model or --shapes")
    architecture = {**ARCHITECTURES, "pi0": pi0, "tiny": _tiny}[config["model_type"]]
    return ModelShapes(name.lower(), tuple(architecture(Fields(config, f"preset {name}"))))

"""A GPT-2-shaped model of bytes, and the text it learns: the source files of Python's own standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
HELD_OUT = 20  # every twentieth part of the text is for validation
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Shape:
    """GPT-2 small by default; ``length`` bytes of context."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024


class Text:
    """Bytes of text that ships with Python, in parts; which differ from version to version, and not between runs."""

    def __init__(self, device: str, most_bytes: int = 2**23) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
        everything = b"".join(path.read_bytes() for path in files)[:most_bytes]
        whole = torch.frombuffer(bytearray(everything), dtype=torch.uint8)
        parts = whole[: len(whole) // HELD_OUT * HELD_OUT].view(HELD_OUT, -1)
        self.held_out, self.training = parts[-1].to(device), parts[:-1].reshape(-1).to(device)

    def batch(self, count: int, length: int, seed: int, held_out: bool = False) -> Tensor:
        """int64 of (count, length + 1), from random places."""
        source = self.held_out if held_out else self.training
        rng = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, len(source) - length - 1, (count, 1), generator=rng)
        places = (starts + torch.arange(length + 1)).to(source.device)
        return source[places].long()


class Layer(nn.Module):
    """Causal self-attention, then an MLP; Q, K and V are one matrix as GPT-2 stores them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(count, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


class ByteModel(nn.Module):
    """Logits (batch, length, 256) for bytes (batch, length)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position_embedding = nn.Embedding(shape.length, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, p in self.named_parameters():  # GPT-2's start: residual branches smaller the more there are
            if p.ndim == 2:
                branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / ((2 * shape.layers) ** 0.5 if branch else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position_embedding(torch.arange(text.shape[1], device=text.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy of each next byte, in nats; in bf16 on a GPU."""
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            logits = self(text[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())

"""The model of ``--preset tiny``, parameter by parameter, and the lines of text that it learns."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, LAYERS, HEADS, VOCABULARY = 64, 192, 2, 4, 256  # text is bytes
LETTERS = b"abcdefgh"
WORD = 5
LINE = 2 * WORD + 2  # a random word, ">", the word reversed, newline


def batch(count: int, lines: int, seed: int) -> Tensor:
    """``count`` texts of ``lines`` lines such as ``bcafe>efacb``, as bytes: int64 of (count, lines·LINE)."""
    rng = torch.Generator().manual_seed(seed)
    words = torch.tensor(list(LETTERS))[torch.randint(0, len(LETTERS), (count, lines, WORD), generator=rng)]
    arrow, newline = (torch.full((count, lines, 1), ord(sign)) for sign in (">", "\n"))
    return torch.cat((words, arrow, words.flip(-1), newline), dim=-1).reshape(count, lines * LINE)


def loss_floor(lines: int) -> float:
    """Nats a byte that no model can beat: each word's letters are chance, all else follows; byte 0 isn't predicted."""
    return (lines * WORD - 1) * math.log(len(LETTERS)) / (lines * LINE - 1)


def normalized(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Layer(nn.Module):
    """Causal self-attention, then an MLP; both read normalized input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = normalized(x)
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (project(read).view(heads).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.down(F.silu(self.up(normalized(x))))
        return result


class TinyModel(nn.Module):
    """Decoder with sinusoidal positions: logits (batch, length, 256) for bytes (batch, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        position = torch.arange(text.shape[1], device=text.device)[:, None]
        angle = position * torch.exp(torch.arange(WIDTH // 2, device=text.device) * (-8.0 / (WIDTH // 2)))
        x = self.embedding(text) + torch.cat((angle.sin(), angle.cos()), dim=-1)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(normalized(x))
        return logits

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy of each next byte, in nats."""
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

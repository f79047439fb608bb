"""Which of a model's parameters are hidden matrices, by name and shape, and why the others are left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Matrix:
    """One parameter that is ``count`` matrices of ``rows``×``cols`` as stored (count > 1: a tensor of experts)."""

    name: str
    rows: int
    cols: int
    count: int = 1


@dataclass(frozen=True)
class LeftOut:
    """One parameter that is not orthogonalized, with the reason in words."""

    name: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Selection:
    """A model's parameters divided: the hidden matrices, and what another optimizer takes; both in given order."""

    matrices: tuple[Matrix, ...]
    left_out: tuple[LeftOut, ...]

    def shapes(self) -> list[tuple[int, int]]:
        """(rows, cols) of every matrix, each as often as it occurs."""
        return [(matrix.rows, matrix.cols) for matrix in self.matrices for _ in range(matrix.count)]

    def counts(self) -> dict[tuple[int, int], int]:
        """(rows, cols) → how many matrices of the model have it, in order of first occurrence."""
        totals: Counter[tuple[int, int]] = Counter()
        for matrix in self.matrices:
            totals[matrix.rows, matrix.cols] += matrix.count
        return dict(totals)


_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_EMBEDDING = re.compile(r"embed|^(wte|wpe|emb|tok_emb|pos_emb|shared|action_in_proj|state_proj)$")
_HEAD = re.compile(r"^(.*_head|head|heads|classifier|score|unembed|to_logits|action_out_proj)$")
_NORM = re.compile(r"norm|^ln$|^ln_\w+$|_ln$|^ln\d+$")
_BIAS = re.compile(r"^bias$|_bias$|^bias_")
_CONVOLUTION = re.compile(r"^conv\d*d?$|_conv\d*d?$")
_SCALE = re.compile(r"^(weight_)?scales?(_inv)?$|^(q?zeros|g_idx|weight_zero_point)$")


def select(
    named_shapes: Iterable[tuple[str, tuple[int, ...]]],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Selection:
    """Divide a model's parameters (name, shape as stored) into hidden matrices and the rest.

    Left out by rule: embeddings, heads, norms, biases, convolutions, quantization scales, and what has no two sides
    longer than 1. A 3-D tensor counts as that many matrices. ``include`` and ``exclude`` are fnmatch patterns on the
    whole name and override the rule; ``exclude`` wins. What is not a matrix by shape cannot be included.
    """
    matrices: list[Matrix] = []
    left_out: list[LeftOut] = []
    for name, given in named_shapes:
        shape = tuple(given)
        reason = _exclusion(name, shape, include, exclude)
        if reason is None:
            matrices.append(Matrix(name, shape[-2], shape[-1], shape[0] if len(shape) == 3 else 1))
        else:
            left_out.append(LeftOut(name, shape, reason))
    return Selection(tuple(matrices), tuple(left_out))


def layer_of(name: str) -> int:
    """The first number in a parameter's name: its block's place in the model; 0 without one."""
    number = _LAYER.search(name)
    return int(number[1]) if number else 0


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that match none of the names: most likely misspelled."""
    known = list(names)
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)]


def _exclusion(name: str, shape: tuple[int, ...], include: Sequence[str], exclude: Sequence[str]) -> str | None:
    excluded_by = next((pattern for pattern in exclude if fnmatchcase(name, pattern)), None)
    if excluded_by is not None:
        return f"excluded by {excluded_by!r}"
    by_shape = _shape_reason(shape)
    if any(fnmatchcase(name, pattern) for pattern in include):
        return None if by_shape is None else f"{by_shape}; cannot be included"
    return _name_reason(name) or by_shape


def _shape_reason(shape: tuple[int, ...]) -> str | None:
    if 0 in shape:
        return "empty"
    if len(shape) < 2:
        return "scalar" if not shape else "vector"
    if len(shape) > 3:
        return f"{len(shape)}-D tensor, not a matrix"
    if 1 in shape[-2:]:
        return "vector: one side is 1"
    return None


def _name_reason(name: str) -> str | None:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    leaf = parts[-1] if parts else ""
    if _BIAS.search(leaf):
        return "bias"
    if _SCALE.search(leaf):
        return "quantization scale"
    # The module that holds the weight, and the one above it; a bare nn.Parameter is known by its own name.
    path = parts[:-1] if len(parts) > 1 and leaf == "weight" else parts
    owner, above = (path[-1] if path else ""), (path[-2] if len(path) > 1 else "")
    if _NORM.search(owner):
        return "norm"
    if _EMBEDDING.search(owner) or "embed" in above:
        return "embedding"
    if _HEAD.search(owner) or path == ["output"]:  # "output.weight" is the head in Meta's Llama checkpoints
        return "head"
    if _CONVOLUTION.search(owner):
        return "convolution"
    return None

"""Random inputs with known spectra, for checking and timing kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dmuon_tune.problem import Problem


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def stored(batch: int, rows: int, cols: int, layout: str) -> tuple[int, int, int]:
    """Shape in memory of a logical rows×cols operand."""
    return (batch, rows, cols) if layout == "row" else (batch, cols, rows)


def gaussian(shape: tuple[int, ...], dtype: str, device: str, rng: torch.Generator, scale: float = 1.0) -> Tensor:
    """Independent normal entries with standard deviation ``scale``."""
    return (torch.randn(shape, device=device, generator=rng) * scale).to(torch_dtype(dtype))


def with_spectrum(singular_values: Tensor, cols: int, seed: int = 0) -> Tensor:
    """A float64 matrix, len(singular_values)×cols, with exactly these singular values and random singular vectors."""
    rows = len(singular_values)
    if cols < rows:
        raise ValueError(f"a wide matrix is needed: {rows} singular values, {cols} columns")
    device = str(singular_values.device)
    rng = generator(device, seed)
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64, device=device, generator=rng))[0]
    right = torch.linalg.qr(torch.randn(cols, rows, dtype=torch.float64, device=device, generator=rng))[0]
    matrix: Tensor = (left * singular_values.double()) @ right.T
    return matrix


def commuting_symmetric(problem: Problem, count: int, device: str, seed: int) -> list[Tensor]:
    """``count`` batches of m×m symmetric matrices that commute exactly even after rounding to the problem's dtype.

    Symmetric circulants under one random signed permutation: rounding keeps the structure, so every product of two is
    exactly symmetric, while entries differ everywhere and an index error shows. A circulant's eigenvalues are its first
    row's discrete Fourier transform; they are scaled to a spectral radius of at most 1.
    """
    batch, m = problem.batch, problem.m
    rng = generator(device, seed)
    place = _circulants(m, device, rng)
    matrices = []
    for _ in range(count):
        row = torch.randn(batch, m // 2 + 1, device=device, generator=rng, dtype=torch.float64)
        full = row[:, torch.minimum(torch.arange(m, device=device), m - torch.arange(m, device=device))]
        radius = torch.fft.fft(full.cpu()).abs().amax(-1, keepdim=True)  # on a GPU loading cuFFT takes far longer
        row = row / radius.to(row.device)
        matrices.append(place(row.to(torch_dtype(problem.dtype))))
    return matrices


def like_gram(problem: Problem, device: str, rng: torch.Generator) -> Tensor:
    """A batch of m×m symmetric matrices with eigenvalues σ², σ uniform in (0.1, 1); exactly symmetric.

    Circulants, as in :func:`commuting_symmetric`: what a recurrence makes of one stays one when it is rounded.
    """
    batch, m = problem.batch, problem.m
    place = _circulants(m, device, rng)
    singular = 0.1 + 0.9 * torch.rand(batch, m // 2 + 1, device=device, generator=rng, dtype=torch.float64)
    rows = torch.fft.irfft(singular.cpu() ** 2, n=m)[:, : m // 2 + 1]
    return place(rows.to(singular.device, torch_dtype(problem.dtype)))


def _circulants(m: int, device: str, rng: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Rows (batch, m // 2 + 1) → symmetric circulants (batch, m, m), their axes permuted and signed at random."""
    signs = torch.randint(0, 2, (m,), device=device, generator=rng) * 2 - 1
    order = torch.randperm(m, device=device, generator=rng)
    distance = (order[:, None] - order[None, :]) % m
    distance = torch.minimum(distance, m - distance)
    return lambda row: row[:, distance] * (signs[:, None] * signs[None, :]).to(row.dtype)

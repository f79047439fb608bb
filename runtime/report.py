"""What the optimizer says of itself: each matrix's recipe, origin, time, and how far an update moves it."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.words import table

from .blocks import Blocks
from .newton_schulz import GramNewtonSchulz, cut_batch
from .parameters import name_of
from .plan import GroupPlan
from .scales import SCALES


@dataclass(frozen=True)
class MatrixReport:
    """One matrix. ``recipe``: form, dtype and restarts; ``origin``: of how many of its chain's products, such as
    ``tuned 3/3``. Microseconds are its share of its batch: ``tuned_us`` as the cache has it, ``measured_us`` of this
    report's own call on the wall clock. ``update_rms`` is the root mean square of lr·s·polar(U), None before a first
    step; σ of polar(U), where asked for; ``owner``: the rank that orthogonalizes it, where there are several."""

    name: str
    rows: int
    cols: int
    batch: str
    recipe: str
    origin: str
    tuned_us: float | None
    measured_us: float | None = None
    update_rms: float | None = None
    sigma_min: float | None = None
    sigma_max: float | None = None
    owner: int | None = None


@dataclass(frozen=True)
class Report:
    """Every matrix of an optimizer; printed as a table. ``mode`` and ``why``: as the optimizer's."""

    matrices: tuple[MatrixReport, ...]
    skipped_steps: int
    mode: str = "local"
    why: str = ""

    def scalars(self) -> dict[str, float]:
        """Tag → value, as ``SummaryWriter.add_scalar`` takes them; a tag begins with ``muon/``."""
        found = {"muon/skipped_steps": float(self.skipped_steps)}
        for matrix in self.matrices:
            for kind in ("update_rms", "sigma_min", "sigma_max"):
                value = getattr(matrix, kind)
                if value is not None:
                    found[f"muon/{kind}/{matrix.name}"] = value
        measured = [matrix.measured_us for matrix in self.matrices if matrix.measured_us is not None]
        return found | {"muon/newton_schulz_us": math.fsum(measured)}

    def __str__(self) -> str:
        rows = [asdict(matrix) for matrix in self.matrices]
        fields = [name for name in (rows[0] if rows else ()) if name != "owner" or rows[0]["owner"] is not None]
        said = table(fields, [[_short(row[name]) for name in fields] for row in rows])
        return f"{said}\n{self.mode}: {self.why}" if self.why else said


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Direction:
    """One matrix to report: its U as the last step had it (None without momentum yet), and lr·s; of a weight's
    ``dtype`` on ``device``."""

    name: str
    shape: tuple[int, int]
    u: Tensor | None
    factor: float
    device: torch.device
    dtype: torch.dtype


def report(
    newton_schulz: GramNewtonSchulz, directions: Sequence[Direction], spectra: bool, skipped_steps: int
) -> Report:
    """The report on these matrices, in their order."""
    together: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, matrix in enumerate(directions):
        together[matrix.device, matrix.dtype, matrix.shape].append(place)
    found: dict[int, MatrixReport] = {}
    for (device, _, shape), some in together.items():
        for part, batch in cut_batch(len(some), *shape):
            planned, places = newton_schulz.planned(batch, device), some[part]
            matrices = [directions[place] for place in places]
            found |= zip(places, _reports(newton_schulz, planned, matrices, spectra), strict=True)
    return Report(tuple(found[place] for place in range(len(directions))), skipped_steps)


def directions_of(
    group: Mapping[str, Any], index: int, position: int, blocks: Blocks, state: Mapping[str, Any]
) -> list[Direction]:
    """A parameter's matrices; U as its last step had it, or M alone where the gradient is gone."""
    p, buffer = group["params"][position], state.get("momentum_buffer")
    shapes = blocks.shapes(p)
    parts: Sequence[Tensor | None] = [None] * len(shapes)
    if buffer is not None:
        u = buffer
        if group["nesterov"] and p.grad is not None:
            u = p.grad + float(group["momentum"]) * buffer
        parts = blocks.of(u)
    return [
        Direction(block_name(group, index, position, place, len(parts)), shape, part, factor_of(group, shape), p.device,
                  p.dtype)
        for place, (part, shape) in enumerate(zip(parts, shapes, strict=True))
    ]


def block_name(group: Mapping[str, Any], index: int, position: int, block: int, blocks: int) -> str:
    """A matrix's name: its parameter's, and which it is of several."""
    bare = name_of(group, index, position).removeprefix("parameter ").strip("'")
    return f"{bare}[{block}]" if blocks > 1 else bare


def factor_of(group: Mapping[str, Any], shape: tuple[int, int]) -> float:
    """lr·s."""
    return float(group["lr"]) * SCALES[group["scale"]](*shape)


def _reports(
    newton_schulz: GramNewtonSchulz, planned: GroupPlan, matrices: Sequence[Direction], spectra: bool
) -> list[MatrixReport]:
    recipe, batch = planned.recipe, len(matrices)
    origins = Counter(bound.origin for bound in planned.bindings.values())
    total = sum(origins.values())
    restarts = "" if recipe.form == "plain" else f" restarts {','.join(map(str, recipe.restarts)) or 'none'}"
    common = MatrixReport(
        name="", rows=recipe.group.rows, cols=recipe.group.cols, batch=recipe.group.label(),
        recipe=f"{recipe.form} {recipe.dtype}{restarts}",
        origin=", ".join(f"{origin} {count}/{total}" for origin, count in sorted(origins.items())),
        tuned_us=None if planned.cost_us is None else planned.cost_us / batch,
    )
    if any(matrix.u is None for matrix in matrices):
        return [replace(common, name=matrix.name) for matrix in matrices]
    polars, measured_us = _timed(newton_schulz, torch.stack([matrix.u for matrix in matrices if matrix.u is not None]))
    # The RMS of each, and its singular values, in one transfer.
    columns = {"update_rms": torch.linalg.vector_norm(polars, dim=(-2, -1)) / math.sqrt(polars[0].numel())}
    if spectra:
        finite = polars.isfinite().all(-1).all(-1)  # LAPACK refuses the others
        values = torch.linalg.svdvals(polars.where(finite[:, None, None], 0)).where(finite[:, None], math.nan)
        columns |= {"sigma_min": values.amin(-1), "sigma_max": values.amax(-1)}
    found = []
    for matrix, row in zip(matrices, torch.stack(list(columns.values()), dim=-1).tolist(), strict=True):
        figures = dict(zip(columns, row, strict=True))
        figures["update_rms"] *= matrix.factor
        found.append(replace(common, name=matrix.name, measured_us=measured_us / batch, **figures))
    return found


def _timed(newton_schulz: GramNewtonSchulz, u: Tensor) -> tuple[Tensor, float]:
    """(Polar factors in fp32 at least, microseconds until they were there)."""
    u = u if u.dtype == torch.float64 else u.float()

    def waited() -> float:
        if u.is_cuda:
            torch.cuda.synchronize(u.device)
        return time.perf_counter()

    newton_schulz(u)  # compiles and loads what this is the first use of
    begin = waited()
    polars = newton_schulz(u)
    return polars, (waited() - begin) * 1e6

"""Scale rules: the factor s of an update W ← (1 − lr·λ)W − lr·s·polar(U), by the shape of the logical matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

# (rows, cols) of the logical matrix as stored, out × in: of a sub-block where the parameter is split.
SCALES: dict[str, Callable[[int, int], float]] = {
    # Jordan, kellerjordan.github.io/posts/muon; torch.optim.Muon's "original"
    "jordan": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    # Liu et al., Muon is Scalable, arXiv 2502.16982, eq. 4: the update's RMS is AdamW's; torch's "match_rms_adamw"
    "moonlight": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    # Yang, Simon, Bernstein, A Spectral Condition for Feature Learning, arXiv 2310.17813: muP's
    "spectral": lambda rows, cols: math.sqrt(rows / cols),
    "none": lambda rows, cols: 1.0,
}

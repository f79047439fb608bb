"""Named sets of Newton–Schulz coefficients (a, b, c), each with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .checks import integer, is_number
from .errors import UsageError
from .words import counted, shown

Triple = tuple[float, float, float]
MOST_STEPS = 1000  # the search for restarts takes seconds there


@dataclass(frozen=True)
class CoefficientSet:
    """Per-step (a, b, c) of X ← aX + (bA + cA²)X, A = XXᵀ.

    ``norm_factor`` is what the set's source multiplies the Frobenius norm by before the first step. Past its last
    triple a set that ``repeats`` goes on with it; another refuses.
    """

    name: str
    triples: tuple[Triple, ...]
    source: str
    repeats: bool = False
    norm_factor: float = 1.0

    def take(self, steps: int) -> tuple[Triple, ...]:
        """The first ``steps`` triples; UsageError where the set has fewer and does not repeat its last."""
        integer("steps", steps)
        if steps > MOST_STEPS:
            raise UsageError(f"steps must be at most {MOST_STEPS}, not {steps}")
        if steps > len(self.triples) and not self.repeats:
            made_for = counted(len(self.triples), "step")
            raise UsageError(f"coefficients {self.name!r} are made for {made_for}, not {steps}")
        return (self.triples + self.triples[-1:] * steps)[:steps]


# Algorithm 1 of Amsel, Persson, Musco, Gower: The Polar Express, arXiv 2505.16932, before its safety factor.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)


def _safe(triples: tuple[Triple, ...], factor: float) -> tuple[Triple, ...]:
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in triples)


JORDAN = CoefficientSet(
    "jordan", ((3.4445, -4.7750, 2.0315),), repeats=True, source="Jordan, https://kellerjordan.github.io/posts/muon/"
)
YOU = CoefficientSet(
    "you",
    (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    source="You, https://x.com/YouJiacheng/status/1905861218138804534",
)
POLAR_EXPRESS_1_01 = CoefficientSet(
    "polar-express-1.01",
    (*_safe(_POLAR_EXPRESS, 1.01), (1.875, -1.25, 0.375)),
    source="arXiv 2505.16932, Algorithm 1: the norm and every triple but the last carry the factor",
    repeats=True,
    norm_factor=1.01,
)
POLAR_EXPRESS_1_02 = CoefficientSet(
    "polar-express-1.02",
    (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    source="KellerJordan/modded-nanogpt train_gpt.py: minimax for five steps, l = 1e-3, cushion 0.02, safety 0.02",
    norm_factor=1.02,
)
POLAR_EXPRESS_1_05 = CoefficientSet(
    "polar-express-1.05",
    _safe(_POLAR_EXPRESS[:5], 1.05),
    source="Dao-AILab/gram-newton-schulz coefficients.py: five steps of arXiv 2505.16932 over 1.05",
)

COEFFICIENTS: dict[str, CoefficientSet] = {
    known.name: known for known in (JORDAN, YOU, POLAR_EXPRESS_1_01, POLAR_EXPRESS_1_02, POLAR_EXPRESS_1_05)
}
# Of the Polar Express sets the one whose fp16 Gram form stays closest to the plain form near square (docs/numerics.md).
DEFAULT_COEFFICIENTS = POLAR_EXPRESS_1_05.name


def coefficient_set(given: str | CoefficientSet | tuple[Triple, ...] | list[Triple] | Triple) -> CoefficientSet:
    """The set of this name, this set, or one made of a triple (repeated) or of a sequence of triples."""
    if isinstance(given, CoefficientSet):
        return given
    if isinstance(given, str):
        if given not in COEFFICIENTS:
            raise UsageError(f"unknown coefficients {given!r}; choose one of {', '.join(COEFFICIENTS)}")
        return COEFFICIENTS[given]
    single = False
    triples: list[tuple[Any, ...]] = []
    try:
        values: list[Any] = list(given)
        single = len(values) == 3 and all(map(is_number, values))
        triples = [(a, b, c) for a, b, c in ([values] if single else values)]
    except (TypeError, ValueError):
        pass  # not iterable, or not by threes
    if not triples or not all(is_number(value) and math.isfinite(value) for triple in triples for value in triple):
        raise UsageError(
            f"coefficients must be a name, an (a, b, c) or a sequence of them, all finite, not {shown(given)}"
        )
    exact = tuple((float(a), float(b), float(c)) for a, b, c in triples)
    return CoefficientSet("given", exact, "given by the caller", repeats=single)

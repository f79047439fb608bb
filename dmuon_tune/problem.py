"""Problem: all that changes a kernel's generated code, and nothing else."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import UsageError

DType = Literal["float16", "bfloat16", "float32"]
Layout = Literal["row", "col"]
Epilogue = Literal["none", "c", "i", "ci"]

DTYPES: tuple[str, ...] = get_args(DType)
LAYOUTS: tuple[str, ...] = get_args(Layout)
EPILOGUES: tuple[str, ...] = get_args(Epilogue)  # of products; an op's file says what the others mean
OTHER_EPILOGUE = re.compile(r"w|m|n|s[1-9][0-9]*(r[1-9][0-9]*)*")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MAX_DIM = 2**31 - 1  # tensor extents are passed to kernels as int32


@dataclass(frozen=True, order=True)
class Problem:
    """One product at one shape: ``op`` over ``batch`` matrices with an (m, n) result and inner length k.

    ``layout`` says how the matrix operands of the op are stored, each tensor contiguous with a leading batch axis:
    ``row`` stores an m×k operand as (m, k), ``col`` stores it as (k, m), which is how a tall weight already lies in
    memory, so it is never copied to transpose it. ``epilogue`` names what is added to the product: ``c`` a β·C term,
    ``i`` a γ·I term, ``ci`` both; the fused ops have others: ``w`` (the weight's update), ``m`` and ``n`` (momentum,
    Nesterov), ``s3`` (3 steps), ``s5r2`` (5 steps, a restart before step 2). Accumulation is always fp32. What the axes
    mean is stated by each op's file.
    """

    op: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str = "float16"
    out_dtype: str = "float16"
    layout: str = "row"
    epilogue: str = "none"

    def __post_init__(self) -> None:
        for axis in ("batch", "m", "n", "k"):
            extent = getattr(self, axis)
            if isinstance(extent, bool) or not isinstance(extent, int) or not 1 <= extent <= MAX_DIM:
                raise UsageError(f"{self.op}: {axis} must be an integer in 1..{MAX_DIM}, not {extent!r}")
        for field, allowed in (
            ("dtype", DTYPES), ("out_dtype", DTYPES), ("layout", LAYOUTS), ("epilogue", EPILOGUES),
        ):
            value = getattr(self, field)
            other = field == "epilogue" and isinstance(value, str) and OTHER_EPILOGUE.fullmatch(value)
            if value not in allowed and not other:
                raise UsageError(
                    f"{self.op}: unsupported {field} {getattr(self, field)!r}; choose one of {', '.join(allowed)}"
                )

    @property
    def has_c(self) -> bool:
        return "c" in self.epilogue

    @property
    def has_identity(self) -> bool:
        return "i" in self.epilogue

    def label(self) -> str:
        """Short text for tables: ``gram 8x2048x2048x5464 float16 row``; a result of another dtype stands behind ``>``,
        the epilogue, where there is one, last."""
        dtypes = self.dtype if self.out_dtype == self.dtype else f"{self.dtype}>{self.out_dtype}"
        tail = "" if self.epilogue == "none" else f" +{self.epilogue}"
        return f"{self.op} {self.batch}x{self.m}x{self.n}x{self.k} {dtypes} {self.layout}{tail}"

    def differences(self, other: Problem) -> dict[str, tuple[Any, Any]]:
        """The fields in which two problems differ: (this one's, the other's)."""
        here, there = self.to_dict(), other.to_dict()
        return {name: (value, there[name]) for name, value in here.items() if value != there[name]}

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def canonical_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Problem:
        return cls(**fields)


def same_code(problem: Problem, other: Problem) -> bool:
    """Whether two problems differ in their extents alone."""
    return all(
        getattr(problem, name) == getattr(other, name) for name in ("op", "dtype", "out_dtype", "layout", "epilogue")
    )


def distance(problem: Problem, other: Problem) -> float:
    """Sum of the axes' ratios in octaves."""
    return sum(
        abs(math.log2(getattr(problem, axis) / getattr(other, axis))) for axis in ("batch", "m", "n", "k")
    )

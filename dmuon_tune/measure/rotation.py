"""The equal sets of buffers that timed launches work on in turn, and what is looked at in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import OpSpec

from .verify import allocate, as_launched, in_launch_order, random_scalars

COLD_L2_MULTIPLE = 3  # rotating over this many cache sizes leaves no operand of the next call in the cache
CPU_BUFFER_BYTES = 256 * 2**20  # last-level caches of shared servers reach 500 MB: copying 3× that is not worth it
MEMORY_SHARE = 0.5  # of the GPU's free memory for rotating buffers


class UnlikeResults(Exception):
    """Launches on equal inputs wrote different bits, as those of a kernel that races with itself do."""


@dataclass(frozen=True)
class Rotation:
    """Sets of arguments as they are launched; of each the tensors with role ``output``, and with role ``inout``.

    ``values`` holds what is launched by its address. Without tensors there is nothing to look at.
    """

    launched: list[list[Any]]
    outputs: list[list[Tensor]] = field(default_factory=list)
    updated: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.launched)

    def written(self, graph: torch.cuda.CUDAGraph, launches: int) -> list[Tensor]:
        """Replay a graph of so many launches over the sets in turn; a copy of what it wrote to the first.

        RuntimeError where it does not write to the first and the last that it works on. Outputs hold NaN before, and
        what is updated zeros, which no update of random values leaves.
        """
        if not self.values:
            return []
        looked_at = (0, min(launches, len(self)) - 1)
        outputs = [tensor.fill_(math.nan) for place in looked_at for tensor in self.outputs[place]]
        updated = [tensor.zero_() for place in looked_at for tensor in self.updated[place]]
        graph.replay()
        torch.cuda.synchronize()
        if any(bool(each.isnan().any()) for each in outputs) or any(bool((each == 0.0).all()) for each in updated):
            raise RuntimeError("the captured graph does not write its outputs: launch on PyTorch's current stream")
        return [tensor.clone() for tensor in self.outputs[0]]

    def require_alike(self, wanted: list[Tensor], launches: int) -> None:
        """UnlikeResults where one of the sets that so many launches in turn work on holds other bits than ``wanted``.

        Nothing is asked of an op that updates tensors in place: its sets were not launched on equally often.
        """
        if any(self.updated):
            return
        for place, expected in enumerate(wanted):
            found = torch.stack([outputs[place] for outputs in self.outputs[:launches]])
            if bool((found.view(torch.uint8) != expected.view(torch.uint8)).any()):
                raise UnlikeResults(f"launches on the same inputs differ: {len(found)} in turn were compared")


RotationFor = Callable[[int], Rotation]  # of at most so many sets


def cold_sets(
    op: OpSpec, problem: Problem, device: str, fingerprint: DeviceFingerprint, seed: int
) -> tuple[list[Any], RotationFor]:
    """(Arguments of a launch, those of so many launches in turn): more of them than a cache holds."""
    scalars = random_scalars(op, problem, seed)
    inputs = op.make_inputs(problem, device, seed)
    first = in_launch_order(op, problem, inputs, allocate(op, problem, device), scalars)
    most_bytes = CPU_BUFFER_BYTES
    if device.startswith("cuda"):
        most_bytes = int(MEMORY_SHARE * torch.cuda.mem_get_info(torch.device(device))[0])

    def rotation_for(launches: int) -> Rotation:
        return _rotation(op, problem, _copies(first, COLD_L2_MULTIPLE * fingerprint.l2_bytes, most_bytes, launches))

    return as_launched(op, problem, first), rotation_for


def _rotation(op: OpSpec, problem: Problem, sets: list[list[Any]]) -> Rotation:
    """Of values in the order of the op's arguments."""
    arguments = op.arguments(problem)

    def of_role(role: str, values: list[Any]) -> list[Tensor]:
        return [value for argument, value in zip(arguments, values, strict=True) if argument.role == role]

    return Rotation(
        [as_launched(op, problem, values) for values in sets],
        [of_role("output", values) for values in sets], [of_role("inout", values) for values in sets], sets,
    )


def _copies(first: list[Any], needed_bytes: int, most_bytes: int, most_sets: int) -> list[list[Any]]:
    """``first`` and copies of it, together ``needed_bytes`` where the limits allow it."""
    set_bytes = sum(value.nbytes for value in first if isinstance(value, Tensor))
    count = max(1, min(math.ceil(needed_bytes / set_bytes), most_bytes // set_bytes, most_sets))
    copies = [[value.clone() if isinstance(value, Tensor) else value for value in first] for _ in range(count - 1)]
    return [first, *copies]

"""Finds parameters that lie over each other in memory, where one's update would change the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .distributed.whole import weight_of

Place = tuple[int, int]  # of a group, and of a parameter in it
Lying = tuple[int, int, Place, Tensor]  # first byte, end, whose, what lies there


def overlapping(groups: Sequence[Sequence[Tensor]]) -> tuple[Place, Place] | None:
    """Two parameters that share memory in this process, where there are such.

    Views of one buffer that share none may lie between each other, as columns of a matrix; a parameter that comes twice
    is one.
    """
    by_device: dict[torch.device, list[Lying]] = defaultdict(list)
    places = {p: (index, position) for index, group in enumerate(groups) for position, p in enumerate(group)}
    for p, place in places.items():
        held = getattr(p, "_local_tensor", weight_of(p))  # a DTensor's
        begin = _address(held)
        if begin and held.numel():
            by_device[held.device].append((begin, begin + _reach_bytes(held), place, held))
    in_order = (sorted(lying, key=lambda one: one[:3]) for lying in by_device.values())
    clusters = (cluster for lying in in_order for cluster in _clusters(lying))
    return next(filter(None, (_meeting(cluster) for cluster in clusters if len(cluster) > 1)), None)


def _address(tensor: Tensor) -> int:
    """Where it begins; 0 where it has no memory of its own to look at."""
    try:
        return tensor.data_ptr() if tensor.layout == torch.strided else 0
    except RuntimeError:  # a tensor that only stands for one
        return 0


def _reach_bytes(tensor: Tensor) -> int:
    """From its first byte to behind its last one."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.element_size()


def _clusters(lying: list[Lying]) -> Iterable[list[Lying]]:
    """Those whose reaches touch the same memory, of what is sorted by its beginning."""
    cluster: list[Lying] = []
    end = 0
    for one in lying:
        if one[0] >= end:
            yield cluster
            cluster = []
        cluster.append(one)
        end = max(end, one[1])
    yield cluster


def _meeting(cluster: list[Lying]) -> tuple[Place, Place] | None:
    """Two of these that share a byte, looked for in the contiguous runs that each consists of."""
    starts, sizes, owners = [], [], []
    for place, (begin, _, _, tensor) in enumerate(cluster):
        run_bytes, offsets = _runs(tensor)
        starts.append(begin + offsets)
        sizes.append(torch.full_like(offsets, run_bytes))
        owners.append(torch.full_like(offsets, place))
    begins, order = torch.cat(starts).sort(stable=True)
    ends, owner = (begins + torch.cat(sizes)[order]), torch.cat(owners)[order]
    # A parameter's own runs lie apart, so the first that two owners share begins before the last end of those in front.
    met = (begins[1:] < ends.cummax(0)[0][:-1]).nonzero()
    if not len(met):
        return None
    second = int(met[0]) + 1
    first = int(ends[:second].argmax())
    one, other = sorted((cluster[int(owner[first])][2], cluster[int(owner[second])][2]))
    return one, other


def _runs(tensor: Tensor) -> tuple[int, Tensor]:
    """(bytes of a contiguous run, where each begins, bytes from the tensor's first)."""
    item, run = tensor.element_size(), 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if not outer and stride == run:
            run *= size
        else:
            outer.append((stride, size))
    offsets = torch.zeros(1, dtype=torch.int64)
    for stride, size in outer:
        offsets = (offsets[:, None] + torch.arange(size) * stride * item).flatten()
    return run * item, offsets

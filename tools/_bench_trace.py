"""How much of a step's communication runs beside computation, from a profiler's trace, which is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

Span = tuple[float, float]  # [begin, end), microseconds
COMPUTATION = "computation"
CARRIED = {"Reduce": "sums", "AllGather": "to all", "Broadcast": "to all"}  # by what is in the names of NCCL's kernels
BETWEEN_TWO = "between two"  # NCCL's other kernels, and copies from GPU to GPU


def traced(step: Callable[[], Any], device: torch.device, steps: int, path: Path) -> tuple[float, float] | None:
    """Microseconds of communication in a step, and the share of it beside which the GPU computes; None on a CPU.

    ``path`` gets the trace of these steps, as chrome://tracing and ui.perfetto.dev show it.
    """
    cuda = device.type == "cuda"
    # Of a GPU's step its kernels alone: to watch the host would make it late.
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))
    if not cuda:
        return None
    us, hidden = communication(json.loads(path.read_text())["traceEvents"])
    return us / steps, hidden


def communication(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Microseconds of a trace in which its GPU communicates, and the share of them in which it also computes."""
    found = lanes(events)
    computed = joined(found.pop(COMPUTATION, []))
    carried = joined(span for spans in found.values() for span in spans)
    total = sum(end - begin for begin, end in carried)
    return total, shared_us(carried, computed) / total if total else 1.0


def lanes(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """What a trace's GPU does: it computes, or carries to all ranks, by sums to few, or otherwise between two."""
    found: dict[str, list[Span]] = {}
    for event in events:
        name, begin = event.get("name", ""), event.get("ts", 0.0)
        if event.get("cat") == "kernel" and not name.startswith("nccl"):
            lane = COMPUTATION
        elif event.get("cat") == "kernel" or (event.get("cat") == "gpu_memcpy" and "PtoP" in name):
            lane = next((CARRIED[part] for part in CARRIED if part in name), BETWEEN_TWO)
        else:
            continue
        found.setdefault(lane, []).append((begin, begin + event.get("dur", 0.0)))
    return dict(sorted(found.items()))


def joined(spans: Iterable[Span]) -> list[Span]:
    """What any of them covers, as spans that lie apart, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def shared_us(these: Sequence[Span], those: Sequence[Span]) -> float:
    """What both cover, each :func:`joined`."""
    total, at = 0.0, 0
    for begin, end in these:
        while at < len(those) and those[at][1] <= begin:
            at += 1
        place = at
        while place < len(those) and those[place][0] < end:
            total += min(end, those[place][1]) - max(begin, those[place][0])
            place += 1
    return total

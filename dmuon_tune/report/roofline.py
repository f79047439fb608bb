"""Ceilings of a device: what its own results reached, and its tensor cores' peak where that is known."""

from __future__ import annotations

from dataclasses import dataclass

from dmuon_tune.problem import Problem

from .data import DeviceReport, work_of

# Dense fp16 or bf16 operations a clock and SM, a multiply-add counted as two. sm_80: NVIDIA A100 white paper,
# 312 TFLOP/s by 108 SMs at 1410 MHz. sm_90: NVIDIA H100 white paper, 989.4 TFLOP/s by 132 SMs at 1830 MHz.
TENSOR_FLOPS_PER_CLOCK = {"sm_80": 2048, "sm_90": 4096}


@dataclass(frozen=True)
class Ceiling:
    """``value`` in FLOP/s, of a memory ceiling in bytes/s; ``by`` says which result reached it."""

    name: str
    value: float
    by: str


@dataclass(frozen=True)
class Ceilings:
    """``compute``: one for each dtype that was measured, the highest first. ``peak`` is None where the architecture's
    rate is not known here or no clock was recorded."""

    compute: tuple[Ceiling, ...]
    memory: Ceiling | None
    peak: Ceiling | None


def ceilings(report: DeviceReport) -> Ceilings:
    """The best of all ok results, disturbed ones included: a disturbance only makes them slower."""
    compute: dict[str, Ceiling] = {}
    memory: Ceiling | None = None
    fastest: dict[Problem, tuple[float, str]] = {}
    for _, trial in report.trials:
        key = trial.key
        median_us = trial.measurement.median_us
        if median_us and median_us < fastest.get(key.problem, (float("inf"), ""))[0]:
            fastest[key.problem] = median_us, key.kernel
    for problem, (median_us, kernel) in fastest.items():
        flops, bytes_moved = work_of(problem)
        if not flops or not bytes_moved:
            continue
        by = f"{kernel} on {problem.label()}"
        rate, bandwidth = flops / median_us * 1e6, bytes_moved / median_us * 1e6
        if problem.dtype not in compute or rate > compute[problem.dtype].value:
            compute[problem.dtype] = Ceiling(f"best {problem.dtype} result", rate, by)
        if memory is None or bandwidth > memory.value:
            memory = Ceiling("best bandwidth of a result", bandwidth, by)
    ordered = sorted(compute.values(), key=lambda ceiling: -ceiling.value)
    return Ceilings(tuple(ordered), memory, _peak(report))


def _peak(report: DeviceReport) -> Ceiling | None:
    per_clock = TENSOR_FLOPS_PER_CLOCK.get(report.device.arch)
    clocks_mhz = clock_range_mhz(report)
    if per_clock is None or clocks_mhz is None:
        return None
    rate = per_clock * report.device.sm_count * clocks_mhz[1] * 1e6
    by = f"{per_clock} FLOPs a clock and SM, {report.device.sm_count} SMs, {clocks_mhz[1]:,} MHz, the highest recorded"
    return Ceiling("16-bit tensor-core peak", rate, by)


def clock_range_mhz(report: DeviceReport) -> tuple[int, int] | None:
    """The lowest and highest SM clock recorded with a timing; None where none was."""
    resources = [trial.measurement.resources for _, trial in report.trials]
    resources += [chain.measurement.resources for _, chain in report.chains]
    found = [clock["sm_mhz"] for each in resources if isinstance(clock := each.get("clock"), dict)]
    return (min(found), max(found)) if found else None

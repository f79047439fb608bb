"""Which configurations of the CuTe DSL span suit a problem before anything was measured."""

from __future__ import annotations

from dataclasses import replace

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.space import axes

from ._cutedsl_space import CHUNK, accumulators, tile_count
from ._cutedsl_span_space import SpanConfig, flight, illegality, members
from .gram_span import steps_of

_UNTUNED = (
    SpanConfig(64, 64, 64, 6),
    SpanConfig(64, 64, 64, 12, blocks_per_sm=1),
    SpanConfig(64, 128, 64, 4),
    SpanConfig(64, 192, 64, 6, blocks_per_sm=1),
    SpanConfig(128, 128, 64, 5, 2, blocks_per_sm=1),
    SpanConfig(128, 128, 64, 3),
    SpanConfig(128, 192, 64, 4, 2, blocks_per_sm=1),
    SpanConfig(192, 128, 64, 4, 3, blocks_per_sm=1),
)
# Fitted to 47 timings of ten spans of three steps (H200, 2026-11-30): the first of those measured takes 1.02 times the
# best one's time in the geometric mean, 1.08 at worst.
_LOADED = 182e3  # bytes of operands a µs, into one multiprocessor
_LOADED_BY_ALL = 16e6
_LATENCY_US = 1.0  # of a load that waits for its stage: a block has no more bytes on their way than its stages hold
_PRODUCTS = 5.8e6  # FLOPs a µs of one multiprocessor
_STORE_US = 2.15  # to form, round and store 64 fp32 accumulators a thread
_PHASE_US = 1.7  # from the last store to the first product of the next phase


def heuristic(problem: Problem, device: DeviceFingerprint) -> SpanConfig | None:
    """The first of ``seeds``; None where none of these few is legal."""
    return next(iter(seeds(problem, device)), None)


def seeds(problem: Problem, device: DeviceFingerprint) -> list[SpanConfig]:
    """A few configurations, each in its best number of rounds, those of the least estimated time first."""
    found = []
    for config in _UNTUNED:
        in_rounds = [replace(config, rounds=rounds) for rounds in axes(SpanConfig)["rounds"]]
        legal = [one for one in in_rounds if illegality(problem, one, device) is None]
        if legal:
            found.append(min((_time_us(problem, one, device), order, one) for order, one in enumerate(legal)))
    return [config for _, _, config in sorted(found, key=lambda entry: entry[0])]


def _time_us(problem: Problem, config: SpanConfig, device: DeviceFingerprint) -> float:
    steps = steps_of(problem)
    phases = 3 * steps - 1 if steps > 1 else 1
    double = max(steps - 2, 0)  # phases of two products
    once, twice = (_phase_us(problem, config, device, products) for products in (1, 2))
    return -(-problem.batch // flight(problem, config)) * ((phases - double) * once + double * twice)


def _phase_us(problem: Problem, config: SpanConfig, device: DeviceFingerprint, products: int) -> float:
    """One phase of the matrices in flight: blocks beside each other share what their multiprocessor can do."""
    tiles = products * tile_count(problem.m, config.tile_m, config.tile_n)
    blocks = members(problem, config, device.sm_count)
    at_once = min(blocks, tiles) * flight(problem, config)
    beside = -(-at_once // device.sm_count)
    column = (config.tile_m + config.tile_n) * 2  # bytes, of both operands
    speed = min(_LOADED / beside, config.stages * CHUNK * column / _LATENCY_US, _LOADED_BY_ALL / at_once)
    multiplying = 2 * config.tile_m * config.tile_n * problem.m * beside / _PRODUCTS
    storing = _STORE_US * accumulators(config) / 64
    return -(-tiles // blocks) * (max(column * problem.m / speed, multiplying) + storing) + _PHASE_US

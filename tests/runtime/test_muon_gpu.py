"""Muon's options on a GPU: fp16 chains against float64, peers over fifty steps, a captured step, memory that stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmuon_tune.runtime import Muon, Split, static
from dmuon_tune.runtime.scales import SCALES

from .reference import gaussian, reference, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SHAPES: list[tuple[int, ...]] = [(128, 384), (384, 128), (128, 384), (256, 256), (1, 64), (64, 1), (100, 77)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum_form": "ema", "nesterov": False, "scale": "moonlight"},
    {"weight_decay": 0.0, "maximize": True, "scale": "spectral"},
    {"coefficients": "polar-express-1.01"},  # two restarts
    {"coefficients": "jordan", "steps": 3},
]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(gaussian(*shape, seed=i).to("cuda", dtype)) for i, shape in enumerate(SHAPES)]


def gradients(count: int) -> list[list[Tensor]]:
    return [[gaussian(*shape, seed=100 * t + i).cuda() for i, shape in enumerate(SHAPES)] for t in range(1, count + 1)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fifty_steps_are_within_half_precision_of_a_float64_muon(options: dict[str, Any]) -> None:
    """An fp16 chain is within 4 % of the same one in float64 on square Gaussian input, else 1 % (docs/numerics.md)."""
    given: dict[str, Any] = {"coefficients": "you", "nesterov": True, "scale": "jordan", "weight_decay": 0.1, **options}
    weights, steps = parameters(), gradients(50)
    start = [weight.detach().clone() for weight in weights]
    run(Muon(weights, lr=0.05, momentum=0.9, **given), weights, steps)
    for i, (weight, before) in enumerate(zip(weights, start, strict=True)):
        want = reference(
            before, [step[i] for step in steps], 0.05, 0.9, given["nesterov"], given["weight_decay"], given["scale"],
            given["coefficients"], given.get("momentum_form") == "ema", False, given.get("maximize", False),
            given.get("steps", 5),
        )
        assert (weight.double() - want).norm() < 0.05 * (want - before).norm(), SHAPES[i]


def test_batches_of_one_size_keep_their_addresses_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run on one chain; of gradients that stay where they are nothing is written again."""
    rows, cols = 120, 392
    monkeypatch.setattr("dmuon_tune.recipe.MAX_BATCH_ELEMENTS", 2 * rows * cols)
    start = [gaussian(rows, cols, seed=i).cuda() for i in range(4)]
    weights, alone = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    optimizer, write = Muon(weights, lr=0.05), static._written
    written: list[Any] = []
    others = [Muon([weight], lr=0.05) for weight in alone]
    for place, (weight, other) in enumerate(zip(weights, alone, strict=True)):
        weight.grad = other.grad = gaussian(rows, cols, seed=10 + place).cuda()
    monkeypatch.setattr(static, "_written", lambda *given, **named: written.append(given) or write(*given, **named))
    for step in range(4):
        if step == 3:
            written.clear()
        for each in (optimizer, *others):
            each.step()
    assert len(optimizer._newton_schulz._chains) == 1 and not written
    for weight, other in zip(weights, alone, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_of_a_split_parameter_move_as_they_would_alone(dim: int) -> None:
    sizes = (128, 64, 64)
    shape = (256, 192) if dim == 0 else (192, 256)
    fused = nn.Parameter(gaussian(*shape).cuda())
    apart = [nn.Parameter(block.clone()) for block in fused.detach().split(sizes, dim)]
    steps = [gaussian(*shape, seed=t).cuda() for t in (1, 2, 3)]
    run(Muon([{"params": [fused], "split": Split(sizes, dim)}], lr=0.1), [fused], [[g] for g in steps])
    run(Muon(apart, lr=0.1), apart, [g.split(sizes, dim) for g in steps])
    torch.testing.assert_close(fused.detach(), torch.cat([block.detach() for block in apart], dim), rtol=0, atol=2e-3)


def test_cautious_decay_and_a_rate_on_the_device_agree_with_numbers() -> None:
    by_number, by_tensor, cautious = parameters(), parameters(), parameters()
    lr, steps = torch.tensor(0.05, device="cuda"), gradients(3)
    run(Muon(by_number, lr=0.05, weight_decay=0.3), by_number, steps)
    run(Muon(by_tensor, lr=lr, weight_decay=0.3), by_tensor, steps)
    run(Muon(cautious, lr=0.05, weight_decay=0.3, cautious=True), cautious, steps)
    for one, other, third in zip(by_number, by_tensor, cautious, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)
        assert third.norm() > other.norm()  # what decays less stays larger


def test_a_captured_step_follows_a_rate_on_the_device() -> None:
    weights, lr = parameters(), torch.tensor(0.05, device="cuda")
    optimizer = Muon(weights, lr=lr)
    for step in gradients(2):
        run(optimizer, weights, [step])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = [weight.detach().clone() for weight in weights]
    lr.fill_(0.0)
    graph.replay()
    assert all(torch.equal(weight, was) for weight, was in zip(weights, before, strict=True))
    lr.fill_(0.5)
    graph.replay()
    for weight, was in zip(weights, before, strict=True):
        rms = float((weight - was).square().mean().sqrt())
        expected = 0.5 * SCALES["jordan"](*weight.shape) / max(weight.shape) ** 0.5  # of an orthogonal update
        assert 0.7 * expected < rms < 1.3 * expected, weight.shape


def test_memory_stays_over_five_hundred_steps() -> None:
    weights, steps = parameters(torch.bfloat16), gradients(2)
    optimizer = Muon(weights, weight_decay=0.1)

    def used() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    run(optimizer, weights, steps * 2)
    for weight in weights:
        weight.grad = None
    before = used()
    run(optimizer, weights, steps * 250)
    for weight in weights:
        weight.grad = None
    assert used() == before


def test_a_step_waits_for_nothing() -> None:
    weights, steps = parameters(), gradients(4)
    optimizer = Muon(weights)
    run(optimizer, weights, steps[:3])
    for weight, gradient in zip(weights, steps[3], strict=True):
        weight.grad = gradient  # elsewhere in memory than the last ones
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_report_says_how_far_the_last_step_moved() -> None:
    weights, (first,) = parameters(), gradients(1)
    optimizer = Muon(weights, lr=0.1)
    before = [weight.detach().clone() for weight in weights]
    run(optimizer, weights, [first])
    report = optimizer.report(spectra=True)
    for row, weight, was in zip(report.matrices, weights, before, strict=True):
        moved = float((weight.detach() - was).square().mean().sqrt())
        assert row.update_rms == pytest.approx(moved, rel=2e-2) and row.measured_us is not None
        assert row.sigma_max is not None and 0.8 < row.sigma_max < 1.3


def test_fifty_steps_agree_with_gram_newton_schulzs_muon() -> None:
    """Its directions are bf16 before the chain, and so are off by 2^-9 an entry; its chain is fp16 as ours."""
    peers: Any = pytest.importorskip("gram_newton_schulz")
    triples = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
               (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]
    mine, peer = parameters(torch.bfloat16)[:4], parameters(torch.bfloat16)[:4]
    start = [weight.detach().clone() for weight in mine]
    steps = [step[:4] for step in gradients(50)]
    run(Muon(mine, lr=0.05, scale="moonlight", weight_decay=0.1, coefficients=triples), mine, steps)
    run(
        peers.Muon([{"params": peer}], lr=0.05, weight_decay=0.1, momentum=0.95, adjust_lr="rms_norm",
                   ns_coefficients=[list(triple) for triple in triples], gram_newton_schulz_restart_iterations=[2]),
        peer, steps,
    )
    for a, b, before in zip(mine, peer, start, strict=True):
        assert (a - b).float().norm() < 0.05 * (b - before).float().norm()

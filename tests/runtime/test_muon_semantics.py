"""What a step computes: fifty steps against a float64 Muon and torch.optim.Muon, every option, and invariances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dmuon_tune.errors import UsageError
from dmuon_tune.runtime import Muon, Split
from dmuon_tune.runtime.updates import Rate, move

from .reference import JORDAN, SCALE, gaussian, orthogonalized, reference, run

SHAPES = [(12, 30), (30, 12), (12, 30), (16, 16), (1, 20), (20, 1)]
STEPS = 50


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(gaussian(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def gradients(shapes: list[tuple[int, ...]], count: int) -> list[list[Tensor]]:
    return [[gaussian(*shape, seed=100 * t + i) for i, shape in enumerate(shapes)] for t in range(1, count + 1)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "scale": "moonlight"},
    {"momentum_form": "ema", "scale": "spectral"},
    {"momentum_form": "ema", "nesterov": False, "scale": "none"},
    {"cautious": True, "maximize": True},
    {"coefficients": "polar-express-1.05"},
    {"coefficients": "you", "steps": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fifty_steps_equal_a_float64_muon(options: dict[str, Any]) -> None:
    """fp32 rounds each update by some 1e-6 of its size (2^-24 amplified by the coefficients); fifty add up at worst."""
    weights, steps = parameters(SHAPES), gradients(SHAPES, STEPS)
    start = [weight.detach().clone() for weight in weights]
    given_options = {"coefficients": "jordan", "scale": "jordan", "nesterov": True, **options}
    run(Muon(weights, lr=0.1, momentum=0.9, weight_decay=0.2, ns_dtype="float32", **given_options), weights, steps)
    for i, weight in enumerate(weights):
        want = reference(
            start[i], [step[i] for step in steps], 0.1, 0.9, given_options["nesterov"], 0.2, given_options["scale"],
            given_options["coefficients"], options.get("momentum_form") == "ema", options.get("cautious", False),
            options.get("maximize", False), options.get("steps", 5),
        )
        worst = STEPS * 0.1 * SCALE[given_options["scale"]](*weight.shape) * 2e-5
        if options.get("cautious"):  # where W or the update is near 0, rounding decides on a decay of lr·λ·W
            close = (weight.double() - want).abs() <= worst
            assert close.float().mean() > 0.98, i
            continue
        torch.testing.assert_close(weight.double(), want, rtol=0, atol=worst)


@pytest.mark.parametrize(("theirs", "ours"), [("original", "jordan"), ("match_rms_adamw", "moonlight")])
def test_fifty_steps_agree_with_torch_optim_muon(theirs: str, ours: str) -> None:
    """Both chains are bf16: each update is off by some 3 % of its norm, in another direction every step."""
    shapes: list[tuple[int, ...]] = [(32, 48), (48, 32), (40, 40)]
    mine, peer = parameters(shapes), parameters(shapes)
    start = [weight.detach().clone() for weight in mine]
    shared: dict[str, Any] = {"lr": 0.05, "momentum": 0.95, "weight_decay": 0.1}
    steps = gradients(shapes, STEPS)
    run(Muon(mine, coefficients=JORDAN, ns_dtype="bfloat16", scale=ours, momentum_form="ema", **shared), mine, steps)
    run(torch.optim.Muon(peer, ns_coefficients=JORDAN, adjust_lr_fn=theirs, **shared), peer, steps)
    for a, b, before in zip(mine, peer, start, strict=True):
        assert (a - b).norm() < 0.03 * (b - before).norm()


@pytest.mark.parametrize("nesterov", [True, False])
def test_an_average_follows_a_schedule_of_mu(nesterov: bool) -> None:
    """As a one-cycle scheduler sets it: the accumulating form then differs by more than a factor."""
    shapes: list[tuple[int, ...]] = [(10, 24)]
    mus = [0.5, 0.6, 0.9, 0.9, 0.0, 0.8]
    for form in ("ema", "accumulate"):
        (weight,), steps = parameters(shapes), gradients(shapes, len(mus))
        start = weight.detach().clone()
        optimizer = Muon([weight], lr=0.1, coefficients="jordan", momentum_form=form, nesterov=nesterov)
        for mu, step in zip(mus, steps, strict=True):
            optimizer.param_groups[0]["momentum"] = mu
            run(optimizer, [weight], [step])
        wanted = {
            ema: reference(start, [s[0] for s in steps], 0.1, mus, nesterov, 0.0, "jordan", ema=ema)
            for ema in (True, False)
        }
        torch.testing.assert_close(weight.double(), wanted[form == "ema"], rtol=0, atol=1e-4)
        assert (weight.double() - wanted[form != "ema"]).abs().max() > 1e-2


def test_the_learning_rate_of_a_device_is_not_read() -> None:
    """The way of a tensor that lies on a device gives what the number gives."""
    polars = gaussian(3, 6, 10, seed=9)
    for cautious in (False, True):
        one, other = parameters([(6, 10)] * 3), parameters([(6, 10)] * 3)
        with torch.no_grad():
            move(one, polars, [Rate(0.1, 0.5, 2.0, cautious)] * 3)
            lr = torch.tensor(0.1)
            move(other, polars, [Rate(lr, 0.5, 2.0, cautious)] * 2 + [Rate(lr, 0.5, 2.0, cautious)])
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            torch.testing.assert_close(a, b)
            old = gaussian(6, 10, seed=i)
            mask = (polars[i] * old >= 0) if cautious else torch.ones(6, 10)
            torch.testing.assert_close(a.detach(), old - 0.05 * old * mask - 0.2 * polars[i])


def test_cautious_decay_sees_the_sign_of_entries_however_small() -> None:
    weight = nn.Parameter(torch.full((2, 4), 1e-4, dtype=torch.float16))
    polars = torch.tensor([[1e-4, -1e-4, 1e-4, -1e-4]] * 2, dtype=torch.float16)[None]
    with torch.no_grad():
        move([weight], polars, [Rate(1.0, 0.5, 2.0**-6, True)])
    expected = torch.tensor([0.5e-4, 1e-4, 0.5e-4, 1e-4]) - 2.0**-6 * polars[0, 0].float()
    torch.testing.assert_close(weight[0].detach().float(), expected, rtol=2e-3, atol=6e-8)


def one_step(shapes: list[tuple[int, ...]], scale_by: float = 1.0, **options: Any) -> list[Tensor]:
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    steps = [[gradient * scale_by for gradient in step] for step in gradients(shapes, 3)]
    run(Muon(weights, lr=1.0, ns_dtype="float32", **options), weights, steps)
    return [weight.detach() for weight in weights]


@settings(max_examples=6, deadline=None)
@given(st.floats(-12, 12), st.sampled_from(["accumulate", "ema"]))
def test_the_scale_of_the_gradients_does_not_matter(exponent: float, form: str) -> None:
    shapes: list[tuple[int, ...]] = [(6, 10), (10, 6), (8, 8)]
    for one, other in zip(one_step(shapes), one_step(shapes, 10**exponent, momentum_form=form), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=4), st.integers(0, 99))
def test_transposed_matrices_move_transposed(shapes: list[tuple[int, int]], seed: int) -> None:
    weights = [[nn.Parameter(torch.zeros(shape)) for shape in some] for some in (shapes, [s[::-1] for s in shapes])]
    steps = [[gaussian(*shape, seed=seed + 9 * t + i) for i, shape in enumerate(shapes)] for t in range(2)]
    for some, flip in zip(weights, (False, True), strict=True):
        given_steps = [[g.mT.contiguous() if flip else g for g in step] for step in steps]
        run(Muon(some, lr=1.0, scale="none", ns_dtype="float32"), some, given_steps)
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one.mT, other, rtol=0, atol=1e-4)


def test_neither_batching_nor_order_changes_a_bit() -> None:
    shapes: list[tuple[int, ...]] = [(24, 40), (40, 24), (24, 40), (16, 16), (24, 40), (16, 16)]
    together = one_step(shapes)
    steps = gradients(shapes, 3)
    for order in ([5, 3, 1, 0, 4, 2], [2, 4, 0, 1, 5, 3]):
        weights = [nn.Parameter(torch.zeros(shapes[i])) for i in order]
        run(Muon(weights, lr=1.0, ns_dtype="float32"), weights, [[step[i] for i in order] for step in steps])
        assert all(torch.equal(weight, together[i]) for weight, i in zip(weights, order, strict=True))
    for i, shape in enumerate(shapes):
        alone = nn.Parameter(torch.zeros(shape))
        run(Muon([alone], lr=1.0, ns_dtype="float32"), [alone], [[step[i]] for step in steps])
        assert torch.equal(alone, together[i]), shape


@pytest.mark.parametrize("dim", [0, 1])
def test_split_parameters_move_as_their_blocks(dim: int) -> None:
    """Blocks that differ in size have a scale of their own, by their own shape."""
    sizes = (16, 4, 4)
    shape = (24, 30) if dim == 0 else (30, 24)
    fused = nn.Parameter(gaussian(*shape))
    apart = [nn.Parameter(block.clone()) for block in fused.detach().split(sizes, dim)]
    group = {"params": [fused], "split": Split(sizes, dim)}
    steps = [gaussian(*shape, seed=t) for t in (1, 2, 3)]
    run(Muon([group], lr=0.1, scale="moonlight", weight_decay=0.1), [fused], [[g] for g in steps])
    run(Muon(apart, lr=0.1, scale="moonlight", weight_decay=0.1), apart, [g.split(sizes, dim) for g in steps])
    assert torch.equal(fused, torch.cat(tuple(apart), dim))


def test_experts_may_be_split_too() -> None:
    experts = nn.Parameter(gaussian(3, 8, 20))
    start, g = experts.detach().clone(), gaussian(3, 8, 20, seed=1)
    group = {"params": [experts], "split": (12, 8), "split_dim": 1}
    run(Muon([group], lr=0.1, coefficients="jordan"), [experts], [[g]])
    for e in range(3):
        for part in (slice(0, 12), slice(12, 20)):
            want = reference(start[e, :, part], [g[e, :, part]], 0.1, 0.95, True, 0.0, "jordan")
            torch.testing.assert_close(experts[e, :, part].double(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("lies", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_moves_as_its_matrix(lies: torch.memory_format) -> None:
    weight = nn.Parameter(gaussian(8, 3, 3, 3).contiguous(memory_format=lies))
    start, steps = weight.detach().clone(), [gaussian(8, 3, 3, 3, seed=t) for t in (1, 2, 3)]
    optimizer = Muon([{"params": [weight], "flatten": True}], lr=0.1, coefficients="jordan")
    for step in steps[:2]:
        run(optimizer, [weight], [[step]])
    other = torch.channels_last if lies == torch.contiguous_format else torch.contiguous_format
    weight.data = weight.data.contiguous(memory_format=other)  # as module.to(memory_format=...) does
    run(optimizer, [weight], [[steps[2]]])
    want = reference(start.flatten(1), [step.flatten(1) for step in steps], 0.1, 0.95, True, 0.0, "jordan")
    torch.testing.assert_close(weight.detach().flatten(1).double(), want, rtol=0, atol=1e-4)


def test_parameters_and_gradients_need_not_be_contiguous() -> None:
    tall, wide = nn.Parameter(gaussian(20, 9).mT), nn.Parameter(gaussian(12, 30, seed=1)[::2, ::3])
    start = [p.detach().clone() for p in (tall, wide)]
    grads = [gaussian(20, 9, seed=2).mT, gaussian(10, 6, seed=3).mT]
    run(Muon([tall, wide], lr=0.1, coefficients="jordan", weight_decay=0.5), [tall, wide], [grads])
    for p, before, gradient in zip((tall, wide), start, grads, strict=True):
        want = reference(before, [gradient], 0.1, 0.95, True, 0.5, "jordan")
        torch.testing.assert_close(p.double(), want, rtol=0, atol=1e-4)


def test_zero_gradients_move_nothing_and_zero_weights_move() -> None:
    still, moved = nn.Parameter(gaussian(5, 9)), nn.Parameter(torch.zeros(5, 9))
    start, g = still.detach().clone(), gaussian(5, 9, seed=1)
    run(Muon([still, moved], lr=0.1, coefficients="jordan"), [still, moved], [[torch.zeros(5, 9), g]])
    assert torch.equal(still, start)
    torch.testing.assert_close(moved.double(), -0.1 * orthogonalized(g.double()), rtol=0, atol=1e-5)


def test_a_momentum_of_its_own_dtype() -> None:
    weight = nn.Parameter(gaussian(6, 10, dtype=torch.bfloat16))
    optimizer = Muon([weight], momentum_dtype="float32")
    run(optimizer, [weight], [[gaussian(6, 10, seed=1)], [gaussian(6, 10, seed=2)]])
    first, second = (gaussian(6, 10, seed=seed).bfloat16().float() for seed in (1, 2))
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], 0.95 * first + second)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ({"split": (16, 4)}, "add up to 20, not to its 24 rows"),
        ({"split": (16, 4), "split_dim": 1}, "add up to 20, not to its 30 columns"),
        ({"split": (12, 12), "split_dim": 2}, "dim must be 0"),
        ({"split": (12, 0, 12)}, "integers of at least 1"),
        ({"split": 12}, "integers of at least 1"),
        ({"flatten": "yes"}, "flatten must be True or False"),
        ({"momentum_form": "average"}, "unknown momentum_form 'average'"),
    ],
)
def test_wrong_splits_and_options_of_groups_are_refused(group: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Muon([{"params": [("qkv.weight", nn.Parameter(gaussian(24, 30)))], **group}])


def test_a_model_of_another_dtype_after_a_step_is_refused_whole() -> None:
    """AdamW's kernels take no state of another dtype, and would say so after the matrices have moved."""
    model = nn.Linear(6, 4)
    optimizer = Muon(model, verbose=False)

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    model.to(torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match=r"'bias': its exp_avg is torch.float32, the parameter torch.float64"):
        step()
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    optimizer.load_state_dict(optimizer.state_dict())
    step()

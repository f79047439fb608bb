"""Muon as a torch.optim.Optimizer: what users, schedulers, scalers and checkpoints rely on, and what bad input does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from dmuon_tune.errors import UsageError
from dmuon_tune.runtime import Muon

from .reference import assert_unchanged, equal, gaussian, loss_of, network, reference, run, snapshot, train


def sparse(model: nn.Module) -> None:
    bias = model.get_parameter("5.bias")
    bias.grad = bias.grad.to_sparse() if bias.grad is not None else None


def another_shape(model: nn.Module) -> None:
    weight = model.get_parameter("3.weight")
    weight.data = torch.zeros(24, 25)
    weight.grad = torch.zeros(24, 25)


FAILURES: dict[str, tuple[Callable[[nn.Module, Muon], Any], str]] = {
    "a sparse gradient of AdamW's": (lambda model, muon: sparse(model), "'5.bias': its gradient is sparse"),
    "state on another device": (
        lambda model, muon: muon.state[model.get_parameter("5.weight")].update(
            momentum_buffer=torch.zeros(6, 24, device="meta")
        ),
        "'5.weight': its momentum_buffer is on meta, the parameter on cpu; move a model before",
    ),
    "AdamW's state of another shape": (
        lambda model, muon: muon.state[model.get_parameter("5.bias")].update(exp_avg=torch.zeros(7)),
        r"'5.bias': its exp_avg is \(7,\), the parameter \(6,\)",
    ),
    "a NaN learning rate": (
        lambda model, muon: muon.param_groups[1].update(lr=math.nan), "group 1: lr must be a finite number"
    ),
    "an unknown scale": (lambda model, muon: muon.param_groups[0].update(scale="x"), "group 0: unknown scale 'x'"),
    "another split": (
        lambda model, muon: muon.param_groups[0].update(split=(12, 12)), r"group 0: split cannot change .* back to \(\)"
    ),
    "another dimension of the split": (
        lambda model, muon: muon.param_groups[0].update(split_dim=1), "group 0: split_dim cannot change"
    ),
    "flattened later": (lambda model, muon: muon.param_groups[0].update(flatten=True), "0: flatten cannot change"),
    "a group of the other optimizer": (
        lambda model, muon: muon.param_groups[0].update(use_muon=False), "group 0: use_muon cannot change"
    ),
    "a group that no longer says whose it is": (
        lambda model, muon: muon.param_groups[1].pop("use_muon"), "group 1: use_muon cannot change"
    ),
    "no learning rate": (lambda model, muon: muon.param_groups[0].pop("lr"), "group 0: lr is missing"),
    "no betas": (lambda model, muon: muon.param_groups[1].pop("betas"), "group 1: betas is missing"),
    "no amsgrad": (lambda model, muon: muon.param_groups[1].pop("amsgrad"), "group 1: amsgrad is missing"),
    "a differentiable AdamW": (
        lambda model, muon: muon.param_groups[1].update(differentiable=True), "group 1: differentiable must be False"
    ),
    "a rate that AdamW's lists cannot have": (
        lambda model, muon: muon.param_groups[1].update(lr=torch.tensor(1e-3), foreach=True, fused=False),
        r"group 1: AdamW cannot step with these options \(RuntimeError: lr as a Tensor .*\); change them",
    ),
    "an AdamW to be captured on a CPU": (
        lambda model, muon: muon.param_groups[1].update(capturable=True, fused=False),
        r"group 1: AdamW cannot step with these options \(AssertionError: If capturable=True",
    ),
    "no direction": (lambda model, muon: muon.param_groups[1].pop("maximize"), "group 1: maximize is missing"),
    "a momentum that is none": (
        lambda model, muon: muon.state[model.get_parameter("5.weight")].update(momentum_buffer="junk"),
        "'5.weight': its momentum_buffer must be a real floating-point tensor, not 'junk'",
    ),
    "a momentum of one element": (
        lambda model, muon: muon.state[model.get_parameter("5.weight")].update(momentum_buffer=torch.tensor(0.0)),
        r"'5.weight': its momentum_buffer is \(\), the parameter \(6, 24\)",
    ),
    "a momentum whose rows are one": (
        lambda model, muon: muon.state[model.get_parameter("5.weight")].update(
            momentum_buffer=torch.zeros(1, 24).expand(6, 24)
        ),
        "'5.weight': its momentum_buffer cannot be updated: its elements share memory",
    ),
    "half of AdamW's state": (
        lambda model, muon: muon.state[model.get_parameter("5.bias")].pop("exp_avg_sq"),
        "'5.bias': its exp_avg_sq must be a real floating-point tensor, not None",
    ),
    "AdamW's state without its step": (
        lambda model, muon: muon.state[model.get_parameter("5.bias")].pop("step"), "'5.bias': its step must be a number"
    ),
    "a parameter that was expanded later": (
        lambda model, muon: setattr(model.get_parameter("5.bias"), "data", torch.zeros(1).expand(6)),
        "'5.bias': its elements share memory",
    ),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_step_changes_nothing(how: str) -> None:
    breaks, message = FAILURES[how]
    model = network()
    optimizer = Muon(model)
    train(model, optimizer, range(2))
    loss_of(model, 3).backward()
    breaks(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(UsageError, match=message):
        optimizer.step()
    assert_unchanged(before, model, optimizer)


def test_a_parameter_that_changed_its_shape_is_named() -> None:
    model = network()
    optimizer = Muon(model)
    train(model, optimizer, range(1))
    another_shape(model)
    with pytest.raises(UsageError, match=r"'3.weight': its momentum_buffer is \(24, 24\), the parameter \(24, 25\)"):
        optimizer.step()


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("weight", [
    torch.zeros(1, 6).expand(4, 6), torch.zeros(4, 1).expand(4, 6), torch.zeros(9).as_strided((4, 6), (1, 1)),
    torch.zeros(4, 6).to_sparse(),
], ids=["rows", "columns", "windows", "sparse"])
def test_parameters_that_cannot_be_updated_where_they_lie_are_refused(weight: Tensor, use_muon: bool) -> None:
    groups = [{"params": [("w", nn.Parameter(weight, requires_grad=False))], "use_muon": use_muon}]
    with pytest.raises(UsageError, match="parameter 'w': its elements share memory|parameter 'w': it is sparse"):
        Muon(groups)


WHOLE = torch.zeros(8, 12)
OVERLAPS = {
    "the same memory": (WHOLE, WHOLE),
    "a row of a matrix": (WHOLE, WHOLE[3]),
    "rows that meet": (WHOLE[:5], WHOLE[4:]),
    "columns that meet": (WHOLE[:, :7], WHOLE[:, 6:]),
    "a column across rows": (WHOLE[2:4], WHOLE[:, 5]),
    "another form": (WHOLE[:4], WHOLE.view(-1)[40:60]),
}
APART = {
    "rows": (WHOLE[:4], WHOLE[4:]),
    "columns": (WHOLE[:, :7], WHOLE[:, 7:]),
    "every second column": (WHOLE[:, ::2], WHOLE[:, 1::2]),
    "a flat buffer": WHOLE.view(-1).split((40, 8, 48)),
    "nothing": (WHOLE[:0], WHOLE),
}


@pytest.mark.parametrize("how", OVERLAPS)
@pytest.mark.parametrize("use_muon", [True, False])
def test_parameters_that_lie_over_each_other_are_refused_by_both_names(how: str, use_muon: bool) -> None:
    one, other = map(nn.Parameter, OVERLAPS[how])
    apart = nn.Parameter(torch.zeros(3, 3))
    first, second = {"params": [("apart", apart), ("one", one)]}, {"params": [("other", other)], "use_muon": use_muon}
    groups = [first | {"use_muon": one.ndim == 2}, second | ({"use_muon": False} if other.ndim == 1 else {})]
    with pytest.raises(UsageError, match="^parameter 'one' and parameter 'other' share memory; "):
        Muon(groups)
    optimizer = Muon(groups[:1])
    with pytest.raises(UsageError, match="share memory"):
        optimizer.add_param_group(groups[1])
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("how", APART)
def test_views_of_one_buffer_that_share_nothing_are_taken(how: str) -> None:
    parts = [nn.Parameter(part) for part in APART[how]]
    for p in parts:
        p.grad = torch.ones_like(p)
    Muon([{"params": [p], "use_muon": p.ndim == 2 and p.numel() > 0} for p in parts]).step()


def test_a_parameter_of_two_modules_is_one() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    names = [name for group in Muon(model).param_groups for name in group["param_names"]]
    assert sorted(names) == ["0.bias", "0.weight", "1.bias"]


def test_views_whose_elements_are_their_own_are_taken() -> None:
    whole = torch.zeros(8, 12)
    weights = [nn.Parameter(view) for view in (whole[::2, ::3], whole[1::2].mT)]
    run(Muon(weights), weights, [[gaussian(*weight.shape) for weight in weights]])
    assert all(bool(weight.any()) for weight in weights)


def test_a_changed_group_is_named_before_the_first_step_and_by_a_report() -> None:
    optimizer = Muon([nn.Parameter(gaussian(4, 6))])
    optimizer.param_groups[0]["use_muon"] = False
    for call in (optimizer.step, optimizer.plan, optimizer.report):
        with pytest.raises(UsageError, match="group 0: use_muon cannot change"):
            call()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["3.weight", "2.bias"])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_where_asked(value: float, name: str) -> None:
    model = network()
    optimizer = Muon(model, skip_nonfinite=True)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    gradient.view(-1)[3] = value
    before = snapshot(model, optimizer)
    optimizer.step()
    assert optimizer.skipped_steps == 1 and optimizer.report().scalars()["muon/skipped_steps"] == 1
    assert_unchanged(before, model, optimizer)
    train(model, optimizer, range(3, 4))
    assert optimizer.skipped_steps == 1 and all(p.isfinite().all() for p in model.parameters())


def test_gradients_of_any_finite_size_are_no_reason_to_skip() -> None:
    weights = [nn.Parameter(gaussian(4, 6, seed=i)) for i in range(2)]
    optimizer = Muon(weights, skip_nonfinite=True)
    run(optimizer, weights, [[gaussian(4, 6) * 1e38 / gaussian(4, 6).abs().max(), torch.zeros(4, 6)]])
    huge = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer.add_param_group({"params": [huge]})
    run(optimizer, [*weights, huge], [[gaussian(4, 6), gaussian(4, 6), gaussian(4, 6, dtype=torch.float64) * 1e300]])
    assert optimizer.skipped_steps == 0 and bool(huge.any())


def test_without_it_nan_spreads_over_its_own_matrix_alone() -> None:
    weights = [nn.Parameter(gaussian(4, 6, seed=i)) for i in range(3)]
    bad = gaussian(4, 6)
    bad[1, 2] = math.nan
    run(Muon(weights), weights, [[gaussian(4, 6, seed=8), bad, gaussian(4, 6, seed=9)]])
    assert [bool(weight.isfinite().all()) for weight in weights] == [True, False, True]


@pytest.mark.parametrize("make", [
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.05, 0.01], total_steps=8, base_momentum=0.8),
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
], ids=["one cycle", "cosine", "sequential"])
def test_schedulers_drive_it_and_resume(make: Any) -> None:
    model = network()
    optimizer = Muon(model)
    scheduler = make(optimizer)
    rates = []
    for seed in range(4):
        train(model, optimizer, range(seed, seed + 1))
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert all(len({rate[place] for rate in rates}) > 1 for place in range(2))
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_rate_that_rounding_left_below_zero_is_no_reason_to_stop() -> None:
    model = network()
    optimizer = Muon(model)
    for group in optimizer.param_groups:
        group["lr"] = -1e-19
    train(model, optimizer, range(1))
    with pytest.raises(UsageError, match="lr must be"):
        Muon(network(), lr=-1e-19)


def test_a_tensor_as_learning_rate_is_read_at_every_step() -> None:
    one, other = nn.Parameter(gaussian(6, 9)), nn.Parameter(gaussian(6, 9))
    lr = torch.tensor(0.5)
    by_tensor, by_number = Muon([one], lr=lr), Muon([other], lr=0.5)
    for step in range(3):
        lr.fill_(0.5 / (step + 1))
        by_number.param_groups[0]["lr"] = float(lr)
        for optimizer, weight in ((by_tensor, one), (by_number, other)):
            run(optimizer, [weight], [[gaussian(6, 9, seed=step)]])
    assert torch.equal(one, other) and by_tensor.param_groups[0]["lr"] is lr


def test_maximize_goes_up_for_both_optimizers() -> None:
    down, up = network(), network()
    for model, sign in ((down, 1.0), (up, -1.0)):
        optimizer = Muon(model, maximize=model is up)
        for seed in range(3):
            optimizer.zero_grad()
            (sign * loss_of(model, seed)).backward()
            optimizer.step()
    for a, b in zip(down.parameters(), up.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_hooks_run_around_a_step() -> None:
    model, ran = network(), list[str]()
    optimizer = Muon(model)
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    train(model, optimizer, range(2))
    assert ran == ["before", "after"] * 2


def test_grad_scaler_skips_what_overflowed_and_steps_otherwise() -> None:
    model = network()
    optimizer, scaler = Muon(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    twin = copy.deepcopy(model)
    plain = Muon(twin)
    for seed in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, seed)).backward()
        gradient = model.get_parameter("0.weight").grad
        if seed == 2 and gradient is not None:
            gradient.fill_(math.inf)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        if seed != 2:
            train(twin, plain, range(seed, seed + 1))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_deep_copy_goes_on_alone() -> None:
    model = network()
    optimizer = Muon(model, momentum_form="ema")
    train(model, optimizer, range(2))
    optimizer.grad_norm = torch.tensor(2.0)
    twin, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(2, 4))
    optimizer.grad_norm = None
    assert not equal(model, twin) and copied.grad_norm == 2
    train(twin, copied, range(2, 4))
    assert equal(model, twin)


def test_it_trains_a_compiled_model_and_in_a_compiled_step() -> None:
    model, within, twin = network(), network(), network()
    compiled: Any = torch.compile(model, backend="eager")
    by_compiled, inside, plain = Muon(compiled), Muon(within), Muon(twin)
    assert [len(group["params"]) for group in by_compiled.param_groups] == [3, 5]
    step: Any = torch.compile(train, backend="eager")
    for seed in range(2):
        train(compiled, by_compiled, range(seed, seed + 1))
        step(within, inside, range(seed, seed + 1))
        train(twin, plain, range(seed, seed + 1))
    for others in zip(model.parameters(), within.parameters(), twin.parameters(), strict=True):
        for other in others[:2]:
            torch.testing.assert_close(other, others[2])


def test_an_optimizer_of_parameters_that_the_model_no_longer_has_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """As after fully_shard, or a cast that replaces them."""
    model = network()
    optimizer = Muon(model, verbose=False)
    for part in model:
        for name, p in list(part.named_parameters()):
            setattr(part, name, nn.Parameter(p.detach().clone()))
    train(model, optimizer, range(3))
    idle = [record.message for record in caplog.records if "no parameter has a gradient" in record.message]
    assert len(idle) == 1 and "make the optimizer after fully_shard" in idle[0]
    caplog.clear()
    train(model, Muon(model, verbose=False), range(2))
    assert "no parameter" not in caplog.text


def test_a_parameter_that_never_had_a_gradient_gets_no_state() -> None:
    model = network()
    optimizer = Muon(model)
    model.get_parameter("3.weight").requires_grad_(False)
    train(model, optimizer, range(1))
    assert model.get_parameter("3.weight") not in optimizer.state


def test_a_gradient_that_lies_otherwise_and_clipping() -> None:
    weight = nn.Parameter(gaussian(6, 10))
    start = weight.detach().clone()
    optimizer = Muon([weight], lr=0.1, coefficients="jordan")
    weight.grad = gaussian(10, 6, seed=3).mT
    norm = nn.utils.clip_grad_norm_([weight], 0.5)
    assert float(norm) == pytest.approx(float(gaussian(10, 6, seed=3).norm()))
    optimizer.step()
    want = reference(start, [gaussian(10, 6, seed=3).mT], 0.1, 0.95, True, 0.0, "jordan")
    torch.testing.assert_close(weight.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_adamws_parameters_must_be_real_too(dtype: torch.dtype) -> None:
    bad = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    with pytest.raises(UsageError, match=f"'gate': AdamW needs real floating-point weights here, not {dtype}"):
        Muon([{"params": [("gate", bad)], "use_muon": False}])


def test_no_parameters_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])
    with pytest.raises(UsageError, match="Tanh has no parameters to optimize"):
        Muon(nn.Tanh())


@pytest.mark.parametrize("lies", ["transposed", "spread", "repeated"])
def test_adamw_takes_gradients_and_moments_that_lie_otherwise(lies: str) -> None:
    """PyTorch's fused kernel alone would read them in the order of memory."""
    def other(full: Tensor) -> Tensor:
        if lies == "repeated":
            return full[:1].expand_as(full)
        if lies == "spread":
            return torch.stack((full, full), -1)[..., 0]
        return full.mT.contiguous().mT

    one, two = (nn.Parameter(gaussian(5, 7)) for _ in range(2))
    found, wanted = (Muon([{"params": [p], "use_muon": False}]) for p in (one, two))
    for step in range(4):
        one.grad = other(gaussian(5, 7, seed=step))
        two.grad = one.grad.contiguous()
        if step == 2:  # as after model.to(memory_format=...)
            one.data = one.data.mT.contiguous().mT
        found.step()
        wanted.step()
        assert torch.equal(one, two)

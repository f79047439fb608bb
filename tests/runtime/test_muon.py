"""Muon: against a float64 Muon written here, against torch.optim.Muon, and as a torch optimizer."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dmuon_tune.errors import UsageError
from dmuon_tune.runtime import Muon, Split

from .reference import JORDAN, SCALE, gaussian, loss_of, network, reference, run, train

SHAPES = [(12, 30), (30, 12), (12, 30), (16, 16), (1, 20), (20, 1)]


@pytest.mark.parametrize("scale", SCALE)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_steps_equal_a_float64_muon(scale: str, nesterov: bool, count: int) -> None:
    weights = [nn.Parameter(gaussian(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    start = [weight.detach().clone() for weight in weights]
    steps = [[gaussian(*shape, seed=100 * t + i) for i, shape in enumerate(SHAPES)] for t in range(1, count + 1)]
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.2, "scale": scale}
    run(Muon(weights, coefficients="jordan", ns_dtype="float32", **options), weights, steps)
    for i, weight in enumerate(weights):
        want = reference(start[i], [step[i] for step in steps], 0.1, 0.9, nesterov, 0.2, scale)
        torch.testing.assert_close(weight.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ns_dtype", "dtype", "atol"),
    [("float16", torch.float32, 2e-3), ("bfloat16", torch.float32, 1e-2), ("float32", torch.bfloat16, 2e-2)],
)
def test_half_precision_differs_by_rounding(ns_dtype: str, dtype: torch.dtype, atol: float) -> None:
    weight = nn.Parameter(gaussian(24, 60, dtype=dtype))
    start, steps = weight.detach().clone(), [[gaussian(24, 60, seed=t, dtype=dtype)] for t in (1, 2)]
    run(Muon([weight], lr=0.1, coefficients="jordan", ns_dtype=ns_dtype), [weight], steps)
    want = reference(start, [step[0] for step in steps], 0.1, 0.95, True, 0.0, "jordan")
    torch.testing.assert_close(weight.double(), want, rtol=0, atol=atol)


def test_3d_parameter_is_a_batch_of_matrices() -> None:
    experts, matrix = nn.Parameter(gaussian(3, 10, 24)), nn.Parameter(gaussian(10, 24, seed=9))
    start, gradient = experts.detach().clone(), gaussian(3, 10, 24, seed=5)
    run(Muon([experts, matrix], lr=0.1, ns_dtype="float32"), [experts, matrix], [[gradient, gaussian(10, 24, seed=6)]])
    for i in range(3):
        want = reference(start[i], [gradient[i]], 0.1, 0.95, True, 0.0, "jordan", "polar-express-1.05")
        torch.testing.assert_close(experts[i].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("theirs", "ours"), [("original", "jordan"), ("match_rms_adamw", "moonlight")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_agrees_with_torch_optim_muon(theirs: str, ours: str, nesterov: bool) -> None:
    """Its momentum is the EMA form, (1 − μ) times ours, which the polar factor does not see; its chain is bf16."""
    shapes = [(32, 48), (48, 32), (40, 40)]
    mine = [nn.Parameter(gaussian(*shape, seed=i)) for i, shape in enumerate(shapes)]
    peer = [nn.Parameter(weight.detach().clone()) for weight in mine]
    steps = [[gaussian(*shape, seed=10 * t + i) for i, shape in enumerate(shapes)] for t in (1, 2, 3)]
    shared: dict[str, Any] = {"lr": 0.05, "momentum": 0.95, "nesterov": nesterov, "weight_decay": 0.1}
    run(Muon(mine, coefficients=JORDAN, ns_dtype="bfloat16", scale=ours, **shared), mine, steps)
    run(torch.optim.Muon(peer, ns_coefficients=JORDAN, adjust_lr_fn=theirs, **shared), peer, steps)
    for a, b in zip(mine, peer, strict=True):
        # two bf16 chains, each within bf16's rounding (2^-8 an element, amplified by the iteration) of the exact one
        assert (a - b).norm() < 0.03 * 3 * 0.05 * math.sqrt(a.numel())


def test_module_is_split_and_the_rest_is_adamw() -> None:
    model = network()
    optimizer = Muon(model, adamw_lr=1e-2, adamw_weight_decay=0.1)
    muon, rest = optimizer.param_groups
    assert muon["param_names"] == ["0.weight", "3.weight", "5.weight"]
    assert rest["param_names"] == ["0.bias", "2.weight", "2.bias", "3.bias", "5.bias"] and rest["lr"] == 1e-2
    twin = copy.deepcopy(model)
    vectors = [p for name, p in twin.named_parameters() if name in rest["param_names"]]
    peer = torch.optim.AdamW(vectors, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    loss_of(model).backward()
    loss_of(twin).backward()
    optimizer.step()
    peer.step()
    for name, p in twin.named_parameters():
        if name in rest["param_names"]:
            assert torch.equal(p, model.get_parameter(name))


def test_include_and_exclude_override_the_rule() -> None:
    groups = Muon(network(), exclude=["3.*"]).param_groups
    assert groups[0]["param_names"] == ["0.weight", "5.weight"]


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_named(option: str, caplog: pytest.LogCaptureFixture) -> None:
    Muon(network(), **{option: ["0.*", "layers.*"]})
    (record,) = caplog.records
    assert record.getMessage() == "pattern 'layers.*' matches no parameter of Sequential"
    with pytest.raises(UsageError, match=f"{option} must be a sequence of patterns"):
        Muon(network(), **{option: "0.weight"})


def test_it_trains() -> None:
    model = network()
    before = loss_of(model).item()
    train(model, Muon(model, lr=0.02), range(60))
    assert loss_of(model).item() < 0.2 * before


@pytest.mark.parametrize("through", ["state_dict", "file", "pickle"])
def test_a_restored_run_continues_bit_for_bit(through: str, tmp_path: Any) -> None:
    model = network()
    optimizer = Muon(model, momentum=0.9)
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    if through == "pickle":
        twin, restored = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        state = optimizer.state_dict()
        if through == "file":
            torch.save(state, tmp_path / "optimizer.pt")
            state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
        restored = Muon(twin, lr=9.0, momentum=0.1)
        restored.load_state_dict(copy.deepcopy(state))
    train(model, optimizer, range(3, 6))
    train(twin, restored, range(3, 6))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, restored.state[b][key])


def test_scheduler_drives_every_group() -> None:
    model = network()
    optimizer = Muon(model, lr=0.5, adamw_lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    train(model, optimizer, range(1))
    scheduler.step()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, range(1, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    model = network()
    optimizer = Muon(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert loss_of(model).item() < first.item()


def test_parameter_without_gradient_is_untouched() -> None:
    weights = [nn.Parameter(gaussian(8, 12, seed=i)) for i in range(3)]
    optimizer = Muon(weights, weight_decay=0.5)
    run(optimizer, weights, [[gaussian(8, 12, seed=i) for i in range(3)]])
    optimizer.zero_grad()
    before = weights[1].detach().clone()
    for weight in (weights[0], weights[2]):
        weight.grad = gaussian(8, 12, seed=7)
    optimizer.step()
    assert torch.equal(weights[1], before)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(weights[1], before)


def test_groups_override_and_can_be_added() -> None:
    a, b, c = (nn.Parameter(gaussian(6, 9, seed=i)) for i in range(3))
    bias = nn.Parameter(gaussian(5))
    optimizer = Muon([{"params": [a], "lr": 0.3}, {"params": [bias], "use_muon": False}], lr=0.1, adamw_lr=0.7)
    optimizer.add_param_group({"params": [b, c], "scale": "none"})
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.7, 0.1]
    start, gradients = [p.detach().clone() for p in (a, b, c)], [gaussian(6, 9, seed=i) for i in (4, 5, 6)]
    run(optimizer, [a, b, c, bias], [[*gradients, gaussian(5, seed=8)]])
    for weight, before, gradient, lr in zip((a, b, c), start, gradients, (0.3, 0.1, 0.1), strict=True):
        want = reference(before, [gradient], lr, 0.95, True, 0.0, "none", "polar-express-1.05")
        torch.testing.assert_close(weight.double(), want, rtol=1e-5, atol=1e-5)


def test_the_plan_is_made_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = Muon(model)
    (resolved,) = optimizer.plan()
    assert {group.label() for group in resolved.groups} == {"1x24x12", "1x24x24", "1x6x24"}
    train(model, optimizer, range(2))
    assert len(caplog.records) == 1 and "1x24x12,1x24x24,1x6x24" in caplog.text


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        (torch.ones(4, dtype=torch.float32), "use_muon=False"),
        (torch.ones(2, 2, 3, 3), "use_muon=False"),
        (torch.ones(3, 0), "use_muon=False"),
        (torch.ones(3, 4, dtype=torch.complex64), "complex64"),
        (torch.ones(3, 4, dtype=torch.int32), "int32"),
    ],
)
def test_bad_parameters_are_refused_by_name(parameter: Tensor, reason: str) -> None:
    bad = nn.Parameter(parameter, requires_grad=False)
    with pytest.raises(UsageError, match=f"'layer.weight'.*{reason}"):
        Muon([("layer.weight", bad)])
    with pytest.raises(UsageError, match=f"parameter 1 of group 0.*{reason}"):
        Muon([nn.Parameter(gaussian(2, 2)), bad])


def test_refused_group_is_not_kept() -> None:
    optimizer = Muon([nn.Parameter(gaussian(2, 3))])
    with pytest.raises(UsageError, match="group 1: unknown scale"):
        optimizer.add_param_group({"params": [nn.Parameter(gaussian(2, 3))], "scale": "big"})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradient_is_refused_by_name() -> None:
    weight = nn.Parameter(gaussian(6, 4))
    optimizer = Muon([("table", weight)])
    weight.grad = gaussian(6, 4).to_sparse()
    with pytest.raises(UsageError, match="'table'.*dense"):
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"lr": math.nan}, {"momentum": 1.0}, {"weight_decay": -0.1}, {"scale": "x"}, {"on_miss": "x"}],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Muon([nn.Parameter(gaussian(2, 3))], **options)


# Of each option what isn't of its type, or is only to Python: True is no number, 1 no flag, "0.1" no float.
WRONG_NUMBERS = ("0.1", None, True, 1j, (0.1,), torch.ones(2), math.nan, math.inf)
WRONG_FLAGS = (1, 0, "yes", None)
WRONG_NAMES = ("x", 3, None, ["jordan"], True)
WRONG_INTEGERS = (2.5, "5", None, True, 0, -1, (5,))
WRONG_TYPES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("lr", "momentum", "weight_decay", "eps"), WRONG_NUMBERS),
    **dict.fromkeys(("adamw_lr", "adamw_eps", "adamw_weight_decay"), WRONG_NUMBERS),
    "adamw_betas": (0.9, None, "ab", (0.9, "a"), (0.9, True), (0.9,), {0.9, 0.95}),
    **dict.fromkeys(("nesterov", "graphs"), WRONG_FLAGS),
    "scale": WRONG_NAMES, "on_miss": ("x", 3, True, 0, ["error"]), "steps": WRONG_INTEGERS,
    "coefficients": ("x", 3, None, True, (1.0, 2.0), (True, 1.0, 1.0), (("1", "2", "3"),), ((1.0, 2.0, None),)),
    "restarts": (2, "2", True, (2.0,), (True,), (0,), ("a",)),
    "ns_dtype": ("float8", 16, True, torch.int8),
    **dict.fromkeys(("include", "exclude"), ("0.weight", 3, None, (3,), True)),
    "layers": ("cache.sqlite", 3, False),
    **dict.fromkeys(("cautious", "maximize", "skip_nonfinite", "verbose"), WRONG_FLAGS),
    "momentum_form": WRONG_NAMES, "momentum_dtype": ("float8", "x", 16, True, torch.int8, "nn"),
    "flatten": ("0.weight", 3, None, (3,), True),
    "splits": ((2, 3), "x", {"a": 3}, {"a": (2.0,)}, {"a": ()}, {"a": "12"}, {3: (2,)}, {"a": Split((1,), 2)}),
    "process_group": ("world", 3, True), "bucket_bytes": WRONG_INTEGERS, "timeout": WRONG_NUMBERS,
    "profile": WRONG_FLAGS, "ownership": (2.0, {"seconds": 2}, True), "mode": WRONG_NAMES,
}


def test_every_option_is_among_those_checked() -> None:
    assert set(WRONG_TYPES) == set(inspect.signature(Muon).parameters) - {"params"}


@pytest.mark.parametrize("option", WRONG_TYPES)
def test_wrongly_typed_options_are_refused_in_one_line(option: str) -> None:
    named = option.removeprefix("ns_") if option == "ns_dtype" else option
    for value in WRONG_TYPES[option]:
        with pytest.raises(UsageError) as refused:
            Muon(network(), **{option: value})
        text = str(refused.value)
        assert named in text and "\n" not in text and ("not " in text or "choose" in text), (value, text)


@pytest.mark.parametrize("value", [2, torch.tensor(0.5), np.float32(0.5)])
def test_numbers_of_other_kinds_are_taken(value: Any) -> None:
    model = network()
    optimizer = Muon(model, lr=value, weight_decay=value)
    loss_of(model).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_use_muon_is_a_flag() -> None:
    with pytest.raises(UsageError, match="group 0: use_muon must be True or False, not 'no'"):
        Muon([{"params": [nn.Parameter(gaussian(2, 3))], "use_muon": "no"}])


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", -1.0), ("weight_decay", -0.1), ("betas", (0.9, 1.0)), ("betas", (0.9,)), ("eps", -1e-8), ("eps", math.nan)],
)
def test_bad_options_of_adamw_are_refused_before_the_first_step(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"adamw_{option}"):
        Muon(network(), **{f"adamw_{option}": value})
    with pytest.raises(UsageError, match=f"group 0: {option}"):
        Muon([{"params": [nn.Parameter(gaussian(3))], "use_muon": False, option: value}])

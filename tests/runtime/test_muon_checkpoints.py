"""Muon's state in and out: checkpoints of this optimizer, of torch.optim.Muon, distributed, pickled, and bad ones."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from dmuon_tune.errors import UsageError
from dmuon_tune.runtime import Muon

from .reference import assert_unchanged, equal, gaussian, network, run, snapshot, train


@pytest.mark.parametrize(("saved", "loaded"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_momentum_keeps_its_values_through_a_checkpoint_of_another_dtype(saved: str, loaded: str) -> None:
    dtypes: list[torch.dtype] = [getattr(torch, name) for name in (saved, loaded)]
    first, second = (nn.Parameter(gaussian(6, 10, dtype=dtype)) for dtype in dtypes)
    optimizer = Muon([first], momentum_form="ema")
    run(optimizer, [first], [[gaussian(6, 10, seed=1)]])
    held = optimizer.state[first]["momentum_buffer"]
    state = copy.deepcopy(optimizer.state_dict())
    for asked, want in ((None, dtypes[1]), ("float32", torch.float32)):
        restored = Muon([second], momentum_dtype=asked)
        restored.load_state_dict(copy.deepcopy(state))
        buffer = restored.state[second]["momentum_buffer"]
        # through the parameter's dtype, as PyTorch loads, fp32 would have lost 16 bits before it was fp32 again
        assert buffer.dtype == want and torch.equal(buffer, held.to(want))
        assert restored.param_groups[0]["momentum_form"] == "ema"
        run(restored, [second], [[gaussian(6, 10, seed=2)]])


def test_state_of_another_model_is_refused_and_nothing_kept_of_it() -> None:
    model, wider = network(), nn.Sequential(*network())
    wider[0] = nn.Linear(13, 24)
    optimizer, other = Muon(model), Muon(wider)
    train(model, optimizer, range(2))
    for p in wider.parameters():
        p.grad = torch.ones_like(p)
    other.step()
    before, lr = snapshot(model, optimizer), optimizer.param_groups[0]["lr"]
    state = other.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    with pytest.raises(UsageError, match=r"'0.weight': its momentum_buffer is \(24, 13\), the parameter \(24, 12\)"):
        optimizer.load_state_dict(state)
    assert_unchanged(before, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == lr
    state["param_groups"][0]["use_muon"] = False
    with pytest.raises(UsageError, match="group 0 is Muon's here and was AdamW's"):
        optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 3))


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("momentum", ["junk", None, torch.zeros(24, 12, dtype=torch.int64), torch.zeros(()),
                                      torch.zeros(24, 12, dtype=torch.complex64)],
                         ids=["junk", "none", "integers", "scalar", "complex"])
@pytest.mark.parametrize("momentum_dtype", [None, "bfloat16"])
def test_a_momentum_that_is_none_is_refused_and_nothing_kept_of_it(momentum: Any, momentum_dtype: str | None) -> None:
    model = network()
    optimizer = Muon(model, momentum_dtype=momentum_dtype)
    train(model, optimizer, range(2))
    before, state = snapshot(model, optimizer), copy.deepcopy(optimizer.state_dict())
    state["state"][0]["momentum_buffer"] = momentum
    with pytest.raises(UsageError, match="parameter '0.weight': its momentum_buffer"):
        optimizer.load_state_dict(state)
    assert_unchanged(before, model, optimizer)


@pytest.mark.parametrize("rule", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("momentum_dtype", [None, "float64"])
def test_pytorchs_muon_goes_on_here(rule: str | None, momentum_dtype: str | None) -> None:
    ours, theirs = (nn.Parameter(gaussian(12, 8)) for _ in range(2))
    torchs = torch.optim.Muon([theirs], lr=0.1, adjust_lr_fn=rule)
    run(torchs, [theirs], [[gaussian(12, 8, seed=seed)] for seed in range(3)])
    optimizer = Muon([ours], coefficients="jordan", momentum_dtype=momentum_dtype)
    saved = copy.deepcopy(torchs.state_dict())
    optimizer.load_state_dict(torchs.state_dict())
    assert torch.equal(torchs.state[theirs]["momentum_buffer"], saved["state"][0]["momentum_buffer"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # is converted once
    ours.data.copy_(theirs.data)
    for optimizer_of, weight in ((torchs, theirs), (optimizer, ours)):
        run(optimizer_of, [weight], [[gaussian(12, 8, seed=3)]])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)  # PyTorch's chain runs in bf16
    held = torchs.state[theirs]["momentum_buffer"]
    torch.testing.assert_close(optimizer.state[ours]["momentum_buffer"].float() * 0.05, held)


def test_an_unknown_scale_of_pytorchs_muon_is_refused() -> None:
    weight = nn.Parameter(gaussian(12, 8))
    state = torch.optim.Muon([weight]).state_dict()
    state["param_groups"][0]["adjust_lr_fn"] = "other"
    with pytest.raises(UsageError, match="adjust_lr_fn 'other' is unknown here"):
        Muon([weight]).load_state_dict(state)


def test_a_checkpoint_from_before_an_option_was_there_loads() -> None:
    model = network()
    optimizer = Muon(model, cautious=True)
    train(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    for name in ("cautious", "momentum_form", "split", "split_dim", "flatten", "maximize"):
        state["param_groups"][0].pop(name)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["cautious"] is True
    train(model, optimizer, range(1, 2))


def test_how_parameters_are_split_is_the_models_and_not_the_checkpoints() -> None:
    whole, cut = (nn.Parameter(gaussian(8, 12)) for _ in range(2))
    saved, optimizer = Muon([whole]), Muon([{"params": [cut], "split": (4, 4)}])
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["split"] == (4, 4)


@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_restore_it_by_name(flat: bool) -> None:
    from torch.distributed.checkpoint import state_dict as by_name

    options = by_name.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, twin = network(), network()
    optimizer, restored = (Muon(each, momentum_form="ema") for each in (model, twin))
    train(model, optimizer, range(2))
    twin.load_state_dict(model.state_dict())
    saved = copy.deepcopy(by_name.get_optimizer_state_dict(model, optimizer, options=options))
    by_name.set_optimizer_state_dict(twin, restored, saved, options=options)
    for each, its in ((model, optimizer), (twin, restored)):
        train(each, its, range(2, 4))
    assert equal(model, twin)


def test_pickling_keeps_options() -> None:
    model = network()
    optimizer = Muon(model, skip_nonfinite=True, momentum_dtype="float64", maximize=True)
    _, restored = pickle.loads(pickle.dumps((model, optimizer)))
    assert restored._skip_nonfinite and restored._momentum_dtype == torch.float64
    assert restored.param_groups[0]["maximize"] is True

"""What Muon shows: the table of a module's parameters, its report, its scalars and its profiler ranges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from dmuon_tune.runtime import Muon, Split, parameters

from .reference import gaussian, network, orthogonalized, run, train


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.stem = nn.Conv2d(3, 8, 2)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(8, 16, bias=False), "norm": nn.LayerNorm(8)}) for _ in range(2)
        )
        self.experts = nn.Parameter(torch.ones(3, 4, 8))
        self.head = nn.Linear(8, 10)


def test_a_module_is_shown_once_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    parameters._printed.clear()
    for _ in range(2):
        Muon(Attention(), splits={"*.qkv.weight": (8, 4, 4)}, flatten=["stem.*"])
    assert [line.split() for line in capsys.readouterr().err.splitlines()] == [
        ["optimizer", "shape", "count", "as", "parameters"],
        ["Muon", "3x4x8", "1", "3", "matrices", "experts"],
        ["Muon", "8x3x2x2", "1", "flattened", "stem.weight"],
        ["Muon", "16x8", "2", "rows", "cut", "into", "8+4+4", "layers.*.qkv.weight"],
        ["AdamW", "10x8", "1", "embedding", "embedding.weight"],
        ["AdamW", "8", "3", "bias", "layers.*.norm.bias", "stem.bias"],
        ["AdamW", "8", "2", "norm", "layers.*.norm.weight"],
        ["AdamW", "10x8", "1", "head", "head.weight"],
        ["AdamW", "10", "1", "bias", "head.bias"],
    ]


def test_the_table_can_be_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parameters._printed.clear()
    Muon(network(), verbose=False)
    monkeypatch.setenv("RANK", "3")
    Muon(network())
    assert capsys.readouterr().err == ""


def test_a_modules_groups_follow_its_layouts() -> None:
    model = Attention()
    splits = {"*.qkv.weight": Split((8, 4, 4))}
    flat, cut, rest = Muon(model, splits=splits, flatten=["*"], exclude=["layers.1.*"]).param_groups
    # a flattening "*" reaches what has more than two dimensions alone; embeddings and heads stay AdamW's
    assert flat["param_names"] == ["experts", "stem.weight"] and flat["flatten"] and flat["split"] == ()
    assert cut["param_names"] == ["layers.0.qkv.weight"] and cut["split"] == (8, 4, 4) and not cut["flatten"]
    assert {"embedding.weight", "head.weight", "layers.1.qkv.weight"} <= set(rest["param_names"])


def test_the_report_says_what_each_matrix_runs_on_and_how_far_it_moves() -> None:
    a, b, c = (nn.Parameter(gaussian(*shape, seed=i)) for i, shape in enumerate([(6, 10), (6, 10), (8, 12)]))
    optimizer = Muon([
        {"params": [("a", a), ("b", b)], "lr": 0.5}, {"params": [("c", c)], "split": (6, 2), "scale": "moonlight"}
    ], coefficients="jordan", lr=0.1)
    fresh = optimizer.report()
    assert [row.name for row in fresh.matrices] == ["a", "b", "c[0]", "c[1]"]
    assert all(row.update_rms is None and row.origin.startswith("library ") for row in fresh.matrices)
    assert [row.batch for row in fresh.matrices] == ["2x6x10", "2x6x10", "1x6x12", "1x2x12"]
    assert [row.recipe for row in fresh.matrices[2:]] == ["gram float32 restarts 2"] * 2
    grads = [gaussian(*p.shape, seed=7 + i) for i, p in enumerate((a, b, c))]
    before = [p.detach().clone() for p in (a, b, c)]
    run(optimizer, [a, b, c], [grads])
    state = {p: optimizer.state[p]["momentum_buffer"].clone() for p in (a, b, c)}
    report = optimizer.report(spectra=True)
    now = [p.detach() for p in (a, b, c)]
    moved: list[Tensor] = [before[0] - now[0], before[1] - now[1], *torch.split(before[2] - now[2], [6, 2])]
    for row, move, shape in zip(report.matrices, moved, [(6, 10), (6, 10), (6, 12), (2, 12)], strict=True):
        assert (row.rows, row.cols) == shape and row.measured_us is not None and row.measured_us > 0
        assert row.update_rms == pytest.approx(float(move.square().mean().sqrt()), rel=1e-3)
    sigma = torch.linalg.svdvals(orthogonalized(1.95 * grads[0].double()))
    assert report.matrices[0].sigma_max == pytest.approx(float(sigma[0]), rel=1e-3)
    assert report.matrices[0].sigma_min == pytest.approx(float(sigma[-1]), rel=1e-3)
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], held) for p, held in state.items())
    lines = str(report).splitlines()
    assert lines[0].split()[:4] == ["name", "rows", "cols", "batch"] and lines[3].split()[0] == "c[0]"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_spectrum_of_an_update_that_is_not_finite_is_nan(value: float) -> None:
    weights = [nn.Parameter(gaussian(4, 6)) for _ in range(2)]
    optimizer = Muon(weights)
    run(optimizer, weights, [[gaussian(4, 6), torch.full((4, 6), value)]])
    good, bad = optimizer.report(spectra=True).matrices
    assert good.sigma_min is not None and good.sigma_max is not None and 0.5 < good.sigma_min < good.sigma_max < 1.5
    assert all(figure is not None and math.isnan(figure) for figure in (bad.sigma_min, bad.sigma_max, bad.update_rms))
    assert "nan" in str(optimizer.report(spectra=True))


def test_scalars_are_tags_and_numbers() -> None:
    model = network()
    optimizer = Muon(model)
    train(model, optimizer, range(1))
    scalars = optimizer.report(spectra=True).scalars()
    assert all(tag.startswith("muon/") and math.isfinite(value) for tag, value in scalars.items())
    assert {"muon/update_rms/3.weight", "muon/sigma_max/0.weight", "muon/newton_schulz_us"} <= scalars.keys()


def test_a_profile_shows_the_phases() -> None:
    model = network()
    optimizer = Muon(model)
    train(model, optimizer, range(1))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(model, optimizer, range(1, 2))
    seen = {event.key for event in profiled.key_averages()}
    phases = {"check", "group", "1x24x12", "1x24x24", "momentum", "chain", "update", "AdamW"}
    assert {f"Muon: {phase}" for phase in phases} <= seen

"""tools/bench_train.py on two gloo ranks: its table and JSON, a rank that fails; its model and its baseline."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dmuon_tune.coefficients import coefficient_set
from dmuon_tune.models import presets

from .. import forked
from ..runtime.distributed.world import Worlds

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
TINY = ("--preset", "tiny", "--device", "cpu", "--batch", "1", "--sequence", "16", "--steps", "2")
MATRICES = {(64, 64): 8, (192, 64): 2, (64, 192): 2}  # of two layers
ELEMENTS = sum(rows * cols * count for (rows, cols), count in MATRICES.items())


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    known = Worlds()
    yield known
    known.close()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    import _bench_model

    yield _bench_model


def environ(tmp_path: Path) -> dict[str, str]:
    """With caches of its own."""
    return {**os.environ, "DMUON_TUNE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1"}


def start(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program on two ranks, the first of which tells."""
    program = str(TOOLS / "bench_train.py")
    done, other = forked.run_ranks(2, program, *TINY, *arguments, environ=environ(tmp_path), folder=tmp_path)
    assert other.returncode == done.returncode and other.stdout == ""
    return done


def start_by_torchrun(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(TOOLS / "bench_train.py"), *TINY, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=environ(tmp_path)
    ) as running:
        try:
            out, err = running.communicate(timeout=200)
        except BaseException:
            running.terminate()  # which ends its ranks; a kill would leave them
            raise
    return subprocess.CompletedProcess(command, running.returncode, out, err)


def test_all_variants_in_one_table_and_all_figures_in_json(tmp_path: Path) -> None:
    variants = ["adamw", "gather-then-compute", "gather-each", "ours", "dedicated", "dedicated-early"]
    done = start(tmp_path, "--json", "out.json", "--still", "--repeat", "1", "--variants", ",".join(variants))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["ranks"], report["batch"], report["sequence"]) == (2, 1, 16)
    assert report["versions"]["torch"] == torch.__version__ and report["date"] in done.stdout
    rows = {row["variant"]: row for row in report["rows"]}
    assert list(rows) == variants
    for row in rows.values():
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert set(row["phases_us"]) == {"forward", "backward", "optimizer"} and min(row["phases_us"].values()) > 0
        assert row["first_us"]["optimizer"] > 0 and row["first_us"].keys() == {*row["phases_us"], "make"}
        assert row["tokens_per_s"] == pytest.approx(2 * 16 / row["median_us"] * 1e6)
        assert row["over_adamw"] == row["median_us"] / rows["adamw"]["median_us"]
        assert all(5 < loss < 6 for loss in row["losses"])  # random bytes: log 256 = 5.5
        assert row["losses"] == rows["adamw"]["losses"]  # the same model, which stays, and tokens
        assert row["optimizer"] in done.stdout
    count = sum(MATRICES.values())
    assert [row["runs"] for row in rows.values()] == [0, 2 * count, 2 * count, count, count, count]
    # In bf16 each rank's half once to the other; in fp32 half of each matrix to its owner, and half of its update back.
    sent = [0, 2 * ELEMENTS, 2 * ELEMENTS, 2 * 4 * ELEMENTS // 2, 0, 0]
    assert [row["sent_bytes"] for row in rows.values()] == sent
    theirs, ours = rows["gather-then-compute"], rows["ours"]
    assert ours["faster"] == theirs["phases_us"]["optimizer"] / ours["phases_us"]["optimizer"]
    owned = ours["ownership"]
    assert all(len(owned[name]) == 2 and min(owned[name]) > 0 for name in ("predicted_us", "alone_us", "inside_us"))
    assert max(owned["predicted_us"]) >= owned["bound_us"] > 0
    held = Counter[tuple[int, int]]()
    for its in owned["batches"]:
        for label, each in its.items():
            batch, *shape = map(int, label.split("x"))
            held[tuple(shape)] += batch * each["count"]
    assert held == MATRICES
    assert {"momentum", "chain", "update"} <= ours["ranges_us"].keys()
    for text in ("slowest owner, ms:", "inside, ms", "x_adamw",
                 "blocks recomputed in the backward: none", "learning rates of 0"):
        assert text in done.stdout


def test_passes_go_forward_and_backward_and_figures_are_their_medians(tmp_path: Path) -> None:
    done = start(tmp_path, "--json", "out.json", "--layers", "1", "--variants", "adamw,gather-each")
    assert done.returncode == 0 and "between passes, ms: step" in done.stdout, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rows[0]["losses"][0] == rows[1]["losses"][0] and rows[0]["losses"][1:] != rows[1]["losses"][1:]
    for row in rows:
        assert row["median_us"] == statistics.median(each["median_us"] for each in row["passes"])
    said = [line for line in done.stderr.splitlines() if ", pass " in line]
    labels = [row["optimizer"] for row in rows]
    assert [line.split(", pass ")[1].rpartition(":")[0] for line in said] == [
        f"{turn} of 2, {label}" for turn, order in ((1, labels), (2, labels[::-1])) for label in order
    ]


def test_a_rank_that_fails_says_why_and_ends_the_run(tmp_path: Path) -> None:
    """The first rank alone writes, so the other one is at work when it finds that it cannot."""
    done = start_by_torchrun(tmp_path, "--json", "none/out.json", "--variants", "adamw")
    ours = [line for line in done.stderr.splitlines() if line.startswith("bench_train")]
    assert done.returncode == 1 and done.stdout == ""
    assert ours == ["bench_train: rank 0: error: --json none/out.json: name a file in an existing folder that can be "
                    "written"]
    assert "exitcode  : 2" in done.stderr  # torchrun's own report of the rank


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "gpt2"), "choose among"), (("--variants", "ours,best"), "unknown 'best'"),
        (("--batch", "0"), "--batch"),
        (("--steps", "1"), "--steps 1"), (("--trace", "none/here"), "name an existing folder"),
        (("--preset", "tiny", "--layers", "3"), "tiny has 2 layers"),
        (("--coefficients", "none"), "coefficient"), ((), "torchrun"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...],
    said: str,
) -> None:
    import _runner
    import bench_train

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["bench_train", *arguments])
    assert _runner.run("bench_train", bench_train.main) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bench_train: error: ") and err.count("\n") == 1 and said in err


def codes(rank: int, size: int) -> int:
    """The exit code of what cannot be asked, on a rank that torchrun has started."""
    sys.path.insert(0, str(TOOLS))
    import _runner
    import bench_train

    os.environ["TORCHELASTIC_USE_AGENT_STORE"], sys.argv[1:] = "True", ["--steps", "1"]
    return _runner.run(f"bench_train: rank {rank}", bench_train.main)


def test_every_rank_that_was_asked_wrongly_ends_with_the_code_of_it(worlds: Worlds) -> None:
    found = worlds(4).outcomes(codes)
    assert [outcome.value for outcome in found] == [2] * 4
    assert sum("error: --steps 1" in outcome.output for outcome in found) == 1, "said once"


@pytest.mark.parametrize("preset", ["qwen2.5-0.5b", "qwen2.5-7b", "llama-3-8b", "tiny"])
def test_the_model_has_the_presets_matrices(model: Any, preset: str) -> None:
    numbers = model.numbers_of(preset)
    with torch.device("meta"):
        made = model.Decoder(numbers, recompute=False)
    normed = preset != "tiny"  # whose norms have no weights
    shapes = Counter(tuple(p.shape) for p in made.parameters() if p.ndim == 2 or normed)
    assert shapes == Counter(shape for _, shape in presets.load(preset).parameters)
    assert numbers.parameters == sum(p.numel() for p in made.parameters() if p.ndim == 2)
    assert model.numbers_of(preset, layers=1).layers == 1


def small(model: Any) -> Any:
    """Tiny, with what larger presets have: fewer heads of keys, and gates."""
    return replace(model.numbers_of("tiny"), kv_heads=2, gated=True)


def losses_and_gradients(model: Any, recompute: bool, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    made = model.Decoder(small(model), recompute)
    loss = made(tokens)
    loss.backward()
    return loss.detach(), [p.grad for p in made.parameters()]


def test_the_loss_is_causal_and_the_same_in_pieces_and_recomputed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(1))
    loss, gradients = losses_and_gradients(model, False, tokens)
    again, recomputed = losses_and_gradients(model, True, tokens)
    assert loss == again and all(map(torch.equal, gradients, recomputed))
    monkeypatch.setattr(model, "LOSS_TOKENS", 5)
    pieces, _ = losses_and_gradients(model, False, tokens)
    torch.testing.assert_close(pieces, loss)

    torch.manual_seed(0)
    made = model.Decoder(small(model), False)
    states: list[Tensor] = []
    made.norm.register_forward_hook(lambda module, given, result: states.append(result.detach()))
    made(tokens)
    other = tokens.clone()
    other[:, 8:] += 1
    other %= 256
    made(other)
    torch.testing.assert_close(states[0][:, :8], states[1][:, :8])  # what comes later changes nothing before
    assert not torch.allclose(states[0][:, 8:], states[1][:, 8:])
    logits = functional.linear(states[0], made.lm_head.weight.detach())
    torch.testing.assert_close(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), loss)


def test_rotations_depend_on_distance_alone(model: Any) -> None:
    rotation = model.rotation_of(9, 8, torch.empty(0))
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(2)).expand(2, 9, 8)
    scores = model.rotated(q, rotation) @ model.rotated(k, rotation).mT
    for distance in (0, 1, 4):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert not torch.allclose(scores[0, 0], scores[0, 4])


ODD = {"a": (7, 5), "b": (7, 5), "c": (3, 11), "d": (9, 9)}  # rows that four ranks divide unevenly, or not at all


def gradients_of(step: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=rng) for name, shape in ODD.items()}


def gathered_steps(rank: int, size: int) -> tuple[dict[str, Tensor], int, int]:
    """Two steps of the baseline from zero; the weights as a whole, runs and bytes of this rank."""
    sys.path.insert(0, str(TOOLS))
    import _bench_variants
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    module = nn.Module()
    for name, shape in ODD.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    module.register_parameter("bias", nn.Parameter(torch.zeros(6)))
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(module, mesh=mesh)
    made = _bench_variants.GatheredMuon(module, _bench_variants.Setting(coefficient_set("you"), False, 2**28, False))
    for step in range(2):
        for name, gradient in gradients_of(step).items():
            parameter = module.get_parameter(name)
            parameter.grad = distribute_tensor(gradient, mesh, parameter.placements)  # type: ignore[attr-defined]
        made.step()
    whole = {name: p.full_tensor().detach() for name, p in module.named_parameters()}  # type: ignore[attr-defined]
    return whole, made.runs(), made.sent_bytes()


def test_the_baseline_moves_shards_as_one_process_would(model: Any, worlds: Worlds) -> None:
    import _bench_methods
    import _bench_variants as variants

    found = worlds(4).run(gathered_steps)
    for name, (rows, cols) in ODD.items():
        momentum, weight = torch.zeros(rows, cols), torch.zeros(rows, cols)
        for step in range(2):
            gradient = gradients_of(step)[name]
            momentum = variants.MOMENTUM * momentum + gradient
            u = (gradient + variants.MOMENTUM * momentum).bfloat16()
            polar = _bench_methods.plain_ns(u[None], coefficient_set("you"), torch.bfloat16)[0]
            weight -= variants.LR * variants.SCALES[variants.SCALE](rows, cols) * polar
        for whole, _, _ in found:
            torch.testing.assert_close(whole[name], weight, rtol=0.02, atol=1e-6)
    padded = sum(-(-rows // 4) * cols for rows, cols in ODD.values())
    assert [(runs, sent) for _, runs, sent in found] == [(4, 3 * 2 * padded)] * 4

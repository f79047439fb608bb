"""``plan``: owners of a model's matrices by cached costs, beside other plans, as a table, JSON and a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import ChainKey, Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Pick, Recipe, first_launch
from dmuon_tune.runtime.ownership import solve
from dmuon_tune.runtime.ownership.around import DEFAULT_BANDWIDTHS

from .conftest import Run

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 140 * 2**30)
GROUP = Group(6, 512, 2048)
RECIPE = Recipe(
    GROUP, "gram", "float16", cost_us=300.0, p20_us=299.0, p80_us=301.0, batch_costs=((1, 80.0), (2, 120.0)),
    picks=(Pick(first_launch(GROUP, "float16"), "momentum.triton", {}, "key"),),
)
NO_GPU_HERE = pytest.mark.skipif(fingerprint("auto").kind == "cuda", reason="this machine has a GPU of its own")


@pytest.fixture
def tuned(tmp_path: Path) -> str:
    """A cache with a timed chain of one group on an H200."""
    return cache(tmp_path / "h200.sqlite", H200)


def cache(path: Path, *devices: DeviceFingerprint) -> str:
    with Store.open(path) as store:
        for device in devices:
            store.put_recipe(device, RECIPE)
            store.record_chain(ChainKey(RECIPE, "digest", device), Measurement.from_samples([300.0], 0.0, {}), {})
    return str(path)


def test_table(run: Run, tuned: str) -> None:
    result = run("plan", "--shapes", "6x512x2048,4x64x64", "--world-size", "4", "--device", "h200", "--cache", tuned)
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0][:2] == ["plan", "makespan_us"]
    assert [line[0] for line in lines[1:6]] == ["ours", "FLOP-balanced", "round-robin", "count-balanced", "bound"]
    by_shape = {tuple(line[:2]): line for line in lines[8:]}
    assert by_shape["512", "2048"][2:4] == ["6", "measured"] and by_shape["64", "64"][2:4] == ["4", "estimated"]
    assert "lie on 1.67 owners in the mean" in result.err
    assert "by costs of NVIDIA H200" in result.err and "1 of 2 shapes are estimated" in result.err


def test_json_is_whole_and_consistent(run: Run, tuned: str) -> None:
    found = run(
        "plan", "--preset", "tiny", "--world-size", "4", "--nodes", "2", "--cache", tuned, "--device", "H200",
        "--format", "json",
    ).json
    assert found["bound_us"] <= found["makespan_us"] == found["plans"]["ours"]["makespan_us"]
    assert all(found["makespan_us"] <= plan["makespan_us"] * (1 + 1e-9) for plan in found["plans"].values())
    assert all(len(plan["loads_us"]) == 4 for plan in found["plans"].values())
    assert sum(shape["count"] for shape in found["shapes"]) == len(found["matrices"])
    assert {matrix["owner"] for matrix in found["matrices"]} <= set(range(4))
    for shape in found["shapes"]:
        assert sum(int(size) * owners for size, owners in shape["batches"].items()) == shape["count"]


@NO_GPU_HERE
def test_the_caches_gpu_where_this_machine_has_none(run: Run, tuned: str, tmp_path: Path) -> None:
    arguments = ("plan", "--shapes", "6x512x2048", "--world-size", "3", "--format", "json")
    assert run(*arguments, "--cache", tuned).json["device"]["name"] == "NVIDIA H200"
    assert run(*arguments).json["device"]["arch"].startswith("cpu")
    other = replace(H200, name="NVIDIA H100", sm_count=114)
    several = run(*arguments, "--cache", cache(tmp_path / "two.sqlite", H200, other))
    assert several.code == 2 and "NVIDIA H100" in several.err and "--device" in several.err


def test_nothing_timed_says_the_rate(run: Run) -> None:
    result = run("plan", "--shapes", "6x512x2048", "--world-size", "3", "--device", "cpu")
    assert result.code == 0 and "estimated, by FLOPs at the rate of 0.1 TFLOP/s" in result.err


def test_memory_and_batches(run: Run, tuned: str) -> None:
    # Two matrices of 2 MiB in bf16 a rank at most: three ranks take two each.
    arguments = ("plan", "--shapes", "6x512x2048", "--world-size", "3", "--cache", tuned, "--device", "h200")
    held = run(*arguments, "--memory-gb", "0.004", "--format", "json").json
    assert held["shapes"][0]["batches"] == {"2": 3} and held["makespan_us"] == 120.0
    for more in (("--memory-gb", "0.001"), ("--memory-gb", "0.004", "--momentum-dtype", "fp32")):
        refused = run(*arguments, *more)
        assert refused.code == 2 and "raise" in refused.err and refused.err.count("\n") == 1


def test_what_owners_run_is_named_and_what_fp32_costs_more(run: Run, tuned: str) -> None:
    # Of fp32 twice the bytes: 24 an element around the chain in place of 12, two matrices a batch in place of four.
    arguments = ("plan", "--shapes", "12x512x2048", "--world-size", "2", "--cache", tuned, "--device", "h200",
                 "--bucket-bytes", str(4 * 512 * 2048 * 2))
    half, whole = (run(*arguments, "--param-dtype", dtype, "--format", "json") for dtype in ("bf16", "fp32"))
    assert half.json["batches"] == ["3x512x2048"] and whole.json["batches"] == ["2x512x2048"]
    assert half.json["makespan_us"] == 2 * (120.0 + (300.0 - 120.0) / 4)
    assert whole.json["makespan_us"] == pytest.approx(3 * (120.0 + 2 * 512 * 2048 * 12 / DEFAULT_BANDWIDTHS["cuda"]))
    assert "1 kind of batch, 1 of them not tuned" in half.err
    assert half.err.endswith(f"to fill the gap run: dmuon-tune tune --shapes 3x512x2048 --cache {tuned}\n")
    every = run("plan", "--shapes", "12x512x2048", "--world-size", "2", "--cache", tuned, "--device", "h200")
    assert every.err.endswith("owners run 1 kind of batch, all tuned\n")


def test_picture(run: Run, tuned: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "plan.png"
    result = run(
        "plan", "--shapes", "6x512x2048", "--world-size", "3", "--cache", tuned, "--device", "h200",
        "--plot", str(path), "--solve-seconds", "0",
    )
    assert result.code == 0 and "ours (longest first)" in result.out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["folder.png", "file/plan.png", "x" * 300 + "/plan.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_plan(
    name: str, run: Run, tuned: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    result = run(
        "plan", "--shapes", "6x512x2048", "--world-size", "3", "--cache", tuned, "--device", "h200",
        "--plot", str(tmp_path / name),
    )
    assert (result.code, result.out) == (2, "") and "cannot be written" in result.err
    assert len(result.err.splitlines()) == 1


def test_without_highs_it_says_so(run: Run, tuned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "has_highs", lambda: False)
    result = run("plan", "--shapes", "7x512x2048", "--world-size", "3", "--cache", tuned, "--device", "h200")
    assert result.code == 0 and "dmuon-tune[ownership]" in result.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--preset", "tiny"), "--world-size"),
        (("--world-size", "4"), "give one of"),
        (("--preset", "tiny", "--world-size", "4", "--nodes", "3"), "3 equal nodes"),
        (("--preset", "tiny", "--world-size", "0"), "positive"),
        (("--preset", "tiny", "--world-size", "1000000000"), "nine digits"),
        (("--preset", "tiny", "--world-size", "4", "--device", "B300"), "no device of the caches"),
        (("--preset", "tiny", "--world-size", "4", "--memory-gb", "-1"), "GiB"),
        (("--preset", "tiny", "--world-size", "4", "--solve-seconds", "-1"), "out of range: 0 or more"),
    ],
)
def test_what_cannot_be_is_one_line_and_code_2(run: Run, arguments: tuple[str, ...], reason: str) -> None:
    result = run("plan", *arguments)
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1 and reason in result.err

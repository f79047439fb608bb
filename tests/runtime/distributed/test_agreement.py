"""All ranks run what the first one's caches say; a kernel that fails on one of them is replaced on all."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from dmuon_tune import kernel_specs
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.errors import MissingEntryError, PeerError, UsageError
from dmuon_tune.recipe import Group, Recipe, chain
from dmuon_tune.runtime import GramNewtonSchulz, Muon
from dmuon_tune.runtime.distributed.agreement import Agreement, Wanted
from dmuon_tune.runtime.distributed.control import Control
from dmuon_tune.runtime.execution import Momentum

from ..reference import gaussian
from ..test_plan import PROVIDER, record, tune_with_library
from .world import Worlds

CPU, FLOAT = torch.device("cpu"), torch.float32
GROUP, OTHER, THIRD = Group(1, 16, 64), Group(2, 24, 40), Group(1, 20, 20)
FAILING = PROVIDER.replace("config, device):\n", """config, device):
    import os
    if os.environ["RANK"] in os.environ.get("DMUON_TUNE_FAILS_ON", ""):
        raise RuntimeError("no compiler on this node")
""", 1)


@pytest.fixture
def second_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of ``failing_gram``, whose kernel does not compile on the ranks in DMUON_TUNE_FAILS_ON."""
    (tmp_path / "failing_gram.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DMUON_TUNE_KERNEL_MODULES", "failing_gram")
    kernel_specs._modules.cache_clear()
    yield tmp_path
    kernel_specs._modules.cache_clear()
    sys.modules.pop("failing_gram", None)


class Said(logging.Handler):
    """The warnings of one case."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def case_plan(rank: int, size: int, folder: str, wanted: list[list[Group]], on_miss: str | None) -> dict[str, Any]:
    """What this rank runs of each call's groups, one for each rank. Only the first rank's cache can be read."""
    own = Path(folder, "cache" if rank == 0 else f"rank{rank}")
    own.mkdir(exist_ok=True)
    if rank > 0:
        (own / "cache.sqlite").write_text("no database")
    os.environ["DMUON_TUNE_CACHE_DIR"] = str(own)
    sys.path.insert(0, folder)
    kernel_specs._modules.cache_clear()
    sys.modules["dmuon_tune.runtime.plan"]._warn_once.cache_clear()
    said = Said()
    logging.getLogger("dmuon_tune").addHandler(said)
    try:
        newton_schulz = GramNewtonSchulz(on_miss=on_miss)
        agreement = Agreement(newton_schulz, CPU, Control(timeout=60))
        plans = [agreement.prepare([Wanted.of(groups[rank], FLOAT, "n", FLOAT)]) for groups in wanted]
        # What runs afterwards is what was agreed, and right.
        for groups in wanted:
            group = groups[rank]
            gradients = gaussian(group.batch, group.rows, group.cols, seed=3)
            polars = torch.zeros_like(gradients)
            momenta = tuple(torch.zeros_like(gradients))
            newton_schulz.step(polars.unbind(), gradients.unbind(), Momentum("n", momenta, 0.9),
                               [(0.0, -1.0)] * group.batch)
            assert ((polars @ polars.mT if group.rows < group.cols else polars.mT @ polars)
                    - torch.eye(group.m)).abs().max() < 0.5
        return {
            "rows": [json.loads(json.dumps(plan.rows())) for plan in plans], "said": said.lines,
            "commands": [plan.command for plan in plans],
        }
    finally:
        logging.getLogger("dmuon_tune").removeHandler(said)
        kernel_specs._modules.cache_clear()
        sys.path.remove(folder)


def entries(rows: list[dict[str, Any]]) -> set[tuple[str, ...]]:
    return {(row["problem"].split()[0], row["origin"], row["layer"], row["kernel"], row["config"]["entry"])
            for row in rows}


def test_all_ranks_run_what_the_first_ones_cache_says(worlds: Worlds, cache_file: Path, tmp_path: Path) -> None:
    """Other groups on each rank; a later call asks for more, and one of them for what is known."""
    tune_with_library(cache_file, GROUP)
    tune_with_library(cache_file, OTHER, "baddbmm")
    with Store.open(cache_file) as store:
        store.put_recipe(fingerprint("cpu"), Recipe(OTHER, "gram", "float32", chunk=1, cost_us=5.0))
    tune_with_library(cache_file, Group(1, OTHER.rows, OTHER.cols))
    calls = [[GROUP, OTHER, GROUP], [GROUP, THIRD, OTHER]]
    first, second, third = worlds(3).run(case_plan, str(tmp_path), calls, None)
    products = {"gram", "gemm_symmetric", "apply"}
    tuned = {(op, "tuned", "user", f"{op}.library", "addmm") for op in products}
    assert entries(first["rows"][0]) == entries(third["rows"][0]) == tuned
    assert entries(second["rows"][0]) == entries(third["rows"][1]) == tuned  # in pieces of one matrix
    assert {row["group"] for row in second["rows"][1]} == {THIRD.label()}
    assert {row["origin"] for row in second["rows"][1]} == {"library"}
    # The first rank alone says what is missing, and no other has looked into its cache.
    assert any("no tuned kernel" in line and THIRD.label() in line for line in first["said"])
    assert second["said"] == third["said"] == []
    assert first["commands"][1] == second["commands"][1] == third["commands"][1] != ""


def test_a_kernel_that_fails_on_one_rank_is_replaced_on_all(
    worlds: Worlds, cache_file: Path, second_kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in (GROUP, OTHER):
        tune_with_library(cache_file, group, "baddbmm")
        problem = next(iter(chain(group, "gram", "float32")))
        record(cache_file, problem, "gram.second", {"entry": "baddbmm"}, 1.0)
    calls = [[GROUP, GROUP, OTHER]]
    monkeypatch.setenv("DMUON_TUNE_FAILS_ON", "1")  # at first: processes keep what they have compiled
    *same, third = worlds(3).run(case_plan, str(second_kernel), calls, None)
    for each in same:
        assert "gram.second" not in {row["kernel"] for row in each["rows"][0]}
        assert entries(each["rows"][0]) == entries(same[0]["rows"][0])
    # The other group runs elsewhere, and there that kernel of another problem compiles.
    assert ("gram", "tuned", "user", "gram.second", "baddbmm") in entries(third["rows"][0])
    (warning,) = [line for line in same[0]["said"] if "failed to compile" in line]
    assert "no compiler on this node (rank 1)" in warning and warning.endswith("the library runs instead")

    monkeypatch.delenv("DMUON_TUNE_FAILS_ON")
    well = worlds(3).run(case_plan, str(second_kernel), calls, None)
    assert all(("gram", "tuned", "user", "gram.second", "baddbmm") in entries(each["rows"][0]) for each in well)


def test_a_first_rank_without_a_readable_cache_decides_by_the_policy(
    worlds: Worlds, cache_file: Path, tmp_path: Path
) -> None:
    cache_file.write_bytes(b"no database" * 100)
    first, second = worlds(2).run(case_plan, str(tmp_path), [[GROUP, OTHER]], None)
    for each in (first, second):
        assert {row["origin"] for row in each["rows"][0]} == {"library"}
    assert any("is left out" in line and str(cache_file) in line for line in first["said"]) and not second["said"]


def test_what_the_first_rank_cannot_decide_ends_all(worlds: Worlds, cache_file: Path, tmp_path: Path) -> None:
    first, second = worlds(2).outcomes(case_plan, str(tmp_path), [[GROUP, GROUP]], "error")
    assert MissingEntryError.__name__ in first.error and "run: dmuon-tune tune --shapes 1x16x64" in first.error
    assert PeerError.__name__ in second.error and "rank 0 failed: MissingEntryError" in second.error


def case_options(rank: int, size: int) -> tuple[list[int], str]:
    """Options that divide a batch in a later step: agreed anew, and refused where ranks differ."""
    optimizer = Muon([{"params": [nn.Parameter(torch.ones(6, 8))]} for _ in range(2 * size)], verbose=False,
                     process_group=distributed.group.WORLD)
    plans = []
    for momentum in (0.9, 0.8, 0.9):
        for group in optimizer.param_groups:
            group["params"][0].grad = gaussian(6, 8, seed=2)
        optimizer.param_groups[0]["momentum"] = optimizer.param_groups[1]["momentum"] = momentum
        for group in optimizer.param_groups[2:]:
            group["momentum"] = 0.9
        optimizer.step()
        assert optimizer._gather is not None
        plans.append(len(optimizer._gather._schedules))
    optimizer.param_groups[0]["nesterov"] = rank > 0
    with pytest.raises(UsageError) as raised:
        optimizer.step()
    return plans, str(raised.value)


def test_options_that_divide_a_batch_later_are_agreed_on(worlds: Worlds) -> None:
    for schedules, error in worlds(2).run(case_options):
        assert schedules == [1, 2, 2]
        assert error == "group 0: nesterov is True on rank 1 and False on rank 0; give all ranks the same"

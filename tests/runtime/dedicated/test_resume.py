"""Checkpoints of dedicated owners are those of gathered ones: saved in either, resumed in the other, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ..distributed.cases import Steps, assert_equal
from ..distributed.test_resume import (
    BEFORE,
    check_one_process_goes_on_and_back,
    check_others_go_on,
    plans,
    reloaded,
    resumed,
    saved,
)
from ..distributed.world import Worlds


@pytest.mark.parametrize(("size", "layout", "others"), [
    (4, "dedicated", [(2, "fsdp"), (3, "dedicated")]),
    (2, "fsdp", [(3, "dedicated")]),
    (4, "dedicated hsdp", [(4, "hsdp"), (2, "dedicated")]),
])
def test_another_world_and_the_other_way_go_on(
    worlds: Worlds, tmp_path: Path, size: int, layout: str, others: Any
) -> None:
    check_others_go_on(worlds, tmp_path, size, layout, others)


def test_one_process_goes_on_and_back(worlds: Worlds, tmp_path: Path) -> None:
    check_one_process_goes_on_and_back(worlds, tmp_path, 3, "dedicated", "dedicated")


@pytest.mark.parametrize("through", ["itself", "file", "whole"])
def test_a_state_dict_restores_it(worlds: Worlds, through: str) -> None:
    before, _, wanted = plans(Steps())
    assert_equal(before, worlds(2).run(reloaded, "dedicated", before, through), wanted, through)


def test_a_parameter_that_has_no_momentum_yet_and_another_dtype(worlds: Worlds, tmp_path: Path) -> None:
    later = {"layers.0.up.weight": range(BEFORE), "experts.into": range(2 * BEFORE)}
    plan = Steps(frozen=("layers.0.out.weight",), skipped=later, dtype=torch.bfloat16,
                 options={"momentum_dtype": "float32"})
    before, after, wanted = plans(plan)
    worlds(2).run(saved, "dedicated", before, str(tmp_path))
    ranks = worlds(3).run(resumed, "dedicated", after, str(tmp_path), {"flatten_optimizer_state_dict": False})
    assert_equal(after, ranks, wanted, "dedicated on 2, then on 3")


def test_files_are_the_same_as_those_of_shards(worlds: Worlds, tmp_path: Path) -> None:
    for layout in ("dedicated", "fsdp"):
        worlds(2).run(saved, layout, Steps(steps=1), str(tmp_path / layout))
    ours, shards = (dcp.FileSystemReader(tmp_path / layout).read_metadata().state_dict_metadata
                    for layout in ("dedicated", "fsdp"))
    assert ours == shards

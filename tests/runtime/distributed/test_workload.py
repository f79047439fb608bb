"""The batches that owners run: what the command line tunes for so many ranks is what these ranks then run."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from dmuon_tune.cli import main
from dmuon_tune.runtime import Muon
from dmuon_tune.runtime.distributed.workload import Owned, batches_of, work_of
from dmuon_tune.runtime.ownership import Costs, Element
from dmuon_tune.runtime.ownership.costs import Point

from .world import Worlds

BUCKET_BYTES = 3 * 64 * 64 * 4  # three of the tiny model's square matrices, one of its large ones


def run_by_ranks(rank: int, size: int) -> list[str]:
    """This rank's batches of the preset ``tiny``."""
    extents = {**dict.fromkeys("qkvo", (64, 64)), "up": (64, 192), "down": (192, 64)}
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(*each, bias=False) for name, each in extents.items()}) for _ in range(2)
    )
    fully_shard(model)
    plans = Muon(model, bucket_bytes=BUCKET_BYTES, verbose=False).plan()
    return [group.label() for plan in plans for group in plan.groups]


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_tuned_for_ranks_is_what_they_run(
    worlds: Worlds, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = worlds(size).run(run_by_ranks)
    assert main([
        "tune", "--preset", "tiny", "--world-size", str(size), "--bucket-bytes", str(BUCKET_BYTES), "--param-dtype",
        "float32", "--device", "cpu", "--backends", "library", "--dry-run",
    ]) == 0
    said = next(line for line in capsys.readouterr().err.splitlines() if f"{size} owners run" in line)
    assert set(said.rpartition(": ")[2].split()) == set(sum(found, []))
    assert {"2x64x64", "1x64x192", "1x192x64"} <= set(sum(found, []))


def test_each_matrix_costs_what_its_dtypes_do() -> None:
    half, whole = Element(2, 2, 2), Element(4, 2, 4)
    asked: list[tuple[int, Element]] = []

    def price(groups: object, element: Element) -> dict[tuple[int, int], Costs]:
        (group,) = groups  # type: ignore[misc]
        asked.append((group.batch, element))
        return {(8, 16): Costs.of([Point(1, 10.0 * element.weight), Point(4, 20.0 * element.weight)])}

    matrices = [Owned(8, 16, layer, element) for layer in range(2) for element in (half, whole)]
    work = work_of(matrices, price, 4 * 8 * 16 * 2)
    assert asked == [(4, half), (4, whole)]
    assert [item.costs.us(4) for item in work] == [40.0, 2 * (40.0 + 40.0 / 3)] * 2  # of the wider two at a time
    assert [item.state_bytes for item in work] == [2 * 8 * 16] * 4 and [item.layer for item in work] == [0, 0, 1, 1]
    assert [group.label() for group in batches_of(matrices, [0] * 4, 1, 4 * 8 * 16 * 2)] == ["2x8x16"]
    assert [group.label() for group in batches_of(matrices[:1] * 5, [0] * 5, 1, 4 * 8 * 16 * 2)] == ["3x8x16", "2x8x16"]

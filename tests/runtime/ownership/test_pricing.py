"""Costs of a model's shapes: measured ones as the caches have them, others by FLOPs and the nearest rate, marked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmuon_tune.cache import Layers, Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Pick, Recipe, first_launch
from dmuon_tune.runtime import GramNewtonSchulz
from dmuon_tune.runtime.ownership import Element, Timed, batches, costs, costs_of, profile, shares
from dmuon_tune.runtime.ownership.around import DEFAULT_BANDWIDTHS
from dmuon_tune.runtime.ownership.pricing import DEFAULT_RATES, flops, timed
from dmuon_tune.space import config_to_dict

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 140 * 2**30)
GROUP = Group(8, 1024, 4096)
RECIPE = Recipe(
    GROUP, "gram", "float16", cost_us=800.0, p20_us=790.0, p80_us=810.0, batch_costs=((1, 150.0), (4, 420.0))
)


def layers(folder: Path, *recipes: Recipe) -> Layers:
    folder.mkdir(exist_ok=True)
    path = folder / "costs.sqlite"
    with Store.open(path) as store:
        for recipe in recipes:
            store.put_recipe(H200, recipe)
    return Layers.open({"DMUON_TUNE_CACHE_PATH": str(path), "HOME": str(folder), "DMUON_TUNE_STARTER": "0"})


def test_flops_of_the_default_chain() -> None:
    m, n = 1024, 4096
    assert flops(Group(3, n, m)) == 3 * (6 * m * m * n + 14 * m**3)


def test_measured_batches_are_kept_and_nothing_is_estimated(tmp_path: Path) -> None:
    with layers(tmp_path, RECIPE) as opened:
        found = costs_of([GROUP], H200, layers=opened)[1024, 4096]
    assert [found.us(batch) for batch in (1, 4, 8)] == [150.0, 420.0, 800.0]
    assert all(map(found.measured, (1, 2, 3, 4, 8))) and not found.measured(9)


def test_wider_dtypes_cost_their_bytes_at_the_rate_of_a_measured_launch(tmp_path: Path) -> None:
    first = first_launch(GROUP, "float16")
    recipe = replace(RECIPE, picks=(Pick(first, "momentum.triton", {}, "key"),))
    spec = kernel("momentum.triton")
    with Store.open(tmp_path / "costs.sqlite") as store:
        config = config_to_dict(spec.untuned(first, H200))
        store.record(tuning_key(spec, first, H200), config, Measurement.from_samples([100.0], 0.0, {}), {})
    half, whole = Element(2, 2, 2), Element(4, 4, 4)
    with layers(tmp_path, recipe) as opened:
        timed, as_timed, wider = (
            costs_of([GROUP], H200, layers=opened, element=each)[1024, 4096] for each in (None, half, whole)
        )
    assert timed == as_timed
    # Twice the 12 bytes an element that momentum's launch moves (10 and 2 of X, whose dtype stays) and an update does.
    assert [wider.us(batch) for batch in (1, 8)] == [150.0 + 100.0 / 8, 900.0]
    with layers(tmp_path / "bare", RECIPE) as opened:
        bare = costs_of([GROUP], H200, layers=opened, element=whole)[1024, 4096]
    assert bare.us(8) == pytest.approx(800.0 + 8 * 1024 * 4096 * (24 - 2) / DEFAULT_BANDWIDTHS["cuda"])


def test_a_miss_is_estimated_at_the_rate_of_the_nearest_shape(tmp_path: Path) -> None:
    far = replace(RECIPE, group=Group(4, 128, 128), cost_us=20.0, batch_costs=())
    with layers(tmp_path, RECIPE, far) as opened:
        found = costs_of([Group(8, 1024, 5000)], H200, layers=opened)[1024, 5000]
    work = flops(Group(8, 1024, 5000))
    assert found.us(8) == pytest.approx(work * 800.0 / flops(GROUP))
    assert not any(map(found.measured, (1, 2, 8)))


def test_below_the_least_measured_batch_of_a_shape() -> None:
    own = Timed(Group(8, 1024, 4096), 800.0)
    slow = Timed(Group(1, 1000, 4096), 700.0)  # near a batch of one, which cannot take longer than eight do
    found = costs([Group(8, 1024, 4096)], [own, slow], "cuda")[1024, 4096]
    assert 100.0 <= found.us(1) <= 800.0 == found.us(8)
    assert not found.measured(1) and found.measured(8)


def test_without_any_measurement_the_default_rate() -> None:
    found = costs([GROUP], [], "cuda")[1024, 4096]
    assert found.us(3) == pytest.approx(flops(Group(3, 1024, 4096)) / DEFAULT_RATES["cuda"])
    assert not found.measured(1)


def test_sums_of_products_and_other_steps_count_as_estimates() -> None:
    summed = replace(RECIPE, p20_us=None, p80_us=None, batch_costs=())
    fewer = replace(RECIPE, group=Group(2, 64, 64), steps=3, restarts=())
    first, second, *rest = timed([summed, fewer, RECIPE])
    assert first == Timed(GROUP, 800.0, measured=False)
    assert second.group == Group(2, 64, 64) and second.us > 800.0 and not second.measured
    assert {each.group.batch for each in rest if each.group.rows == 1024} == {1, 4}


def test_another_dtype_is_another_chain(tmp_path: Path) -> None:
    with layers(tmp_path, RECIPE) as opened:
        assert not costs_of([GROUP], H200, "bfloat16", opened)[1024, 4096].measured(8)


def test_a_shape_that_is_too_large_for_one_batch_runs_in_several() -> None:
    shape = 8192, 16384  # two at once
    found = costs([Group(2, *shape), Group(2, *shape), Group(1, *shape)], [Timed(Group(2, *shape), 9000.0)], "cuda")
    assert found[shape].us(4) == 18000.0 and found[shape].measured(4)


def test_what_is_timed_covers_what_an_owner_gets() -> None:
    sizes = [group.batch for group in batches([Group(19, 64, 32), Group(18, 64, 32), Group(1, 8, 8)], 8)]
    assert sizes == [1, 2, 4, 8, 1]  # 37 of eight owners: five each
    assert [group.batch for group in batches([Group(3, 64, 32)], 1)] == [1, 2, 3]
    assert [group.batch for group in batches([Group(9, 64, 32)], 1, 5 * 64 * 32)] == [1, 2, 4, 5]
    assert [group.batch for group in batches([Group(9, 64, 32)], 1, 10)] == [1]


def test_ranks_share_the_timing() -> None:
    wanted = batches([Group(28, 512, 512), Group(28, 64, 512), Group(5, 32, 32)], 4)
    parts = shares(wanted, 3)
    assert sorted(group for part in parts for group in part) == sorted(wanted)
    assert parts == shares(wanted, 3)
    assert max(sum(map(flops, part)) for part in parts) < sum(map(flops, wanted))


def test_profile_times_an_owners_step() -> None:
    wanted = [Group(1, 16, 48), Group(2, 16, 48)]
    found = profile(wanted, torch.device("cpu"), GramNewtonSchulz(layers=Layers({})), torch.float32)
    assert [each.group for each in found] == wanted and all(each.us > 0 and each.measured for each in found)
    assert costs([Group(2, 16, 48)], found, "cpu")[16, 48].measured(2)

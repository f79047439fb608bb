"""A chain's whole space on made-up times: what is asked for, and the record of it."""

from __future__ import annotations

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.errors import UsageError
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, chain
from dmuon_tune.search.chain_space import chain_space
from dmuon_tune.search.replay import run

CPU, GROUP = fingerprint("cpu"), Group(2, 64, 128)


def ok(median_us: float) -> Measurement:
    return Measurement.from_samples([median_us], 0.0, {"compile_s": 0.5, "run_s": 0.25})  # which the record leaves out


def test_every_combination_once_the_winners_first() -> None:
    with Store.open("sqlite://") as store:
        with pytest.raises(UsageError, match="no result for some product of 2x64x128.*tune --shapes 2x64x128"):
            chain_space(GROUP, "float32", None, 2, CPU, store)
        for problem in chain(GROUP, "gram", "float32"):
            store.record(tuning_key(kernel(f"{problem.op}.library"), problem, CPU), {"entry": "baddbmm"}, ok(5.0), {})
            spec = kernel(f"{problem.op}.tilelang")
            for place, config in enumerate(spec.legal_space(problem, CPU)[:3]):
                store.record(tuning_key(spec, problem, CPU), dict(vars(config)), ok(7.0 + place), {})
        space = chain_space(GROUP, "float32", "gram", 2, CPU, store)
        asked = []
        while (recipe := space.candidate) is not None:
            asked.append(recipe)
            space.observe(ok(100.0 - len(asked)) if len(asked) != 3 else Measurement("crashed"))
    assert len(asked) == len({recipe.picks for recipe in asked}) == space.size == 2**3
    assert {pick.kernel.partition(".")[2] for pick in asked[0].picks} == {"library"}
    record = space.record("here")
    assert list(record.axes) == ["pieces of", "gram none", "gemm_symmetric c", "apply none"]
    assert record.axes["apply none"][0] == "apply.library {'entry': 'baddbmm'}"
    assert record.rows == [[0, a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)] and record.first == [0]
    assert record.times_us == [99.0, 98.0, None, 96.0, 95.0, 94.0, 93.0, 92.0] and record.failures == 1
    assert not record.has_costs
    assert run(record, "enumeration", 8, 0)[1] == list(range(8))

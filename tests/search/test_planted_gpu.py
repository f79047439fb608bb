"""Bad candidates on a GPU: they ruin contexts, hold the device and take the process along; none wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmuon_tune.cache import Store
from dmuon_tune.kernel_specs import EXTRA_MODULES_VARIABLE
from dmuon_tune.recipe import Group
from dmuon_tune.search import TuneOptions, tune

PLANTED = {  # how each of its configurations ends, and how many there are
    "bad_ragged": ("wrong_result", 11), "bad_half": ("wrong_result", 11), "bad_infinite": ("wrong_result", 11),
    "bad_memory": ("launch_error", 11), "bad_nan": ("wrong_result", 1), "bad_compile": ("compile_error", 1),
    "bad_crash": ("crashed", 1), "bad_zero": ("crashed", 1), "gpu_store": ("launch_error", 1),
    "gpu_spin": ("timeout", 1), "gpu_rare": ("wrong_result", 1),
}
OPTIONS = TuneOptions(device="cuda", backends=("library",), trials=100, patience=None, run_timeout_s=15, workers=4)


@pytest.mark.gpu
def test_fifty_one_bad_candidates_on_a_gpu_never_win_and_are_never_tried_again(
    misbehaving: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv(EXTRA_MODULES_VARIABLE, ",".join(PLANTED))
    assert sum(count for _, count in PLANTED.values()) == 51
    with Store.open(tmp_path / "cache.sqlite") as store:
        first = tune([Group(1, 9, 21)], store, OPTIONS)
        assert first.complete and first.chains.failed == 0
        ended: dict[str, list[str]] = {}
        for trial in store.all_trials():
            assert trial.measurement.ok or trial.measurement.log, trial.key.kernel
            ended.setdefault(trial.key.kernel.rpartition(".")[2], []).append(trial.measurement.status)
        assert {name: ended[name] for name in PLANTED} == {
            name: count * [status] for name, (status, count) in PLANTED.items()
        }
        for report in first.problems:
            assert report.is_end or report.winner is not None
            assert report.winner is None or report.winner.key.kernel == f"{report.problem.op}.library"
        assert tune([Group(1, 9, 21)], store, OPTIONS).measured == 0

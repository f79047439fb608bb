"""Which devices share results: the same limits under any name; for others the field in which they differ is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.backends import backends
from dmuon_tune.cache import Layers, Store
from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.standing import staleness
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 140 * 2**30)
PROBLEM = Problem("gram", 8, 2048, 2048, 5464)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(H200, name="NVIDIA H200 NVL"), None),
        (replace(H200, sm_count=120), "other device: sm_count 132, here 120"),
        (replace(H200, arch="sm_100"), "other device: arch sm_90, here sm_100"),
        (replace(H200, arch="sm_90", l2_bytes=2**25), "other device: l2_bytes 62914560, here 33554432"),
    ],
)
def test_devices_share_by_their_limits_alone(tmp_path: Path, other: DeviceFingerprint, said: str | None) -> None:
    path, key = tmp_path / "cache.sqlite", tuning_key(kernel("gram.library"), PROBLEM, H200)
    with Store.open(path) as store:
        store.record(key, {"entry": "addmm"}, Measurement.from_samples([10.0], 1e-6, {}), {})
    assert staleness(key, other) == said
    with Layers.open({"HOME": str(tmp_path), "DMUON_TUNE_CACHE_PATH": str(path)}) as layers:
        assert len(layers.entries(PROBLEM, other)) == (said is None)


def not_installed(backend: Any, device: DeviceFingerprint) -> Toolchain:
    raise ModuleNotFoundError("No package metadata was found for dsl")


def test_another_code_toolchain_or_check_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    key = tuning_key(kernel("gram.library"), PROBLEM, H200)
    assert staleness(key) is None
    assert (staleness(replace(key, spec_digest="00" * 32)) or "").startswith("other digest: code 00000000, now ")
    assert (staleness(replace(key, validation="")) or "").startswith("other validation: unknown, here float64")
    gone = kernel("gram.cutedsl")
    monkeypatch.setattr(type(backends()["cutedsl"]), "toolchain", not_installed)
    tuned = replace(key, kernel=gone.name, spec_digest=gone.digest(), toolchain=Toolchain("cutedsl", (("dsl", "4.5"),)))
    assert staleness(tuned) == "toolchain not installed here: dsl 4.5"
    old = replace(key.toolchain, versions=(("torch", "1.0"),))
    assert (staleness(replace(key, toolchain=old)) or "").startswith("other toolchain: torch 1.0, here ")

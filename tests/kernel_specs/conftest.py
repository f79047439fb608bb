"""The device of CuTe DSL's GPU tests; a fault in a kernel's answers, elsewhere a warning, fails a test here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dmuon_tune.device import DeviceFingerprint


@pytest.fixture(scope="module")
def hopper() -> DeviceFingerprint:
    from dmuon_tune.backends.probe import fingerprint

    found = fingerprint("cuda")
    if found.arch != "sm_90":
        pytest.skip(f"the CuTe DSL kernels run on sm_90, this is {found.arch}")
    return found


@pytest.fixture(autouse=True)
def faultless(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    faults = [record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when)
              if record.name == "dmuon_tune.spec"]
    assert not faults

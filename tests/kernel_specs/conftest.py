"""The device that CuTe DSL's GPU tests run on."""

from __future__ import annotations

import pytest

from dmuon_tune.device import DeviceFingerprint


@pytest.fixture(scope="module")
def hopper() -> DeviceFingerprint:
    from dmuon_tune.backends.probe import fingerprint

    found = fingerprint("cuda")
    if found.arch != "sm_90":
        pytest.skip(f"the CuTe DSL kernels run on sm_90, this is {found.arch}")
    return found

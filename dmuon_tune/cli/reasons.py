"""Says why a kernel does not serve a problem here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmuon_tune.device import DeviceFingerprint
    from dmuon_tune.problem import Problem
    from dmuon_tune.spec import KernelSpec


def refusal(spec: KernelSpec, problem: Problem, device: DeviceFingerprint) -> str | None:
    """Why this kernel cannot run a problem on a device, its backend's reasons first; None where it can."""
    from dmuon_tune.backends import backends

    backend = backends().get(spec.backend)
    if backend is None:
        return f"there is no backend {spec.backend!r}"
    return backend.unavailable(device) or spec.refusal(problem, device)

"""Says why a kernel or a cache entry does not serve here: refused, missing, other code, toolchain or device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuon_tune.cache import CacheEntry
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


def staleness(entry: CacheEntry, device: DeviceFingerprint | None = None) -> str | None:
    """The field in which the entry's key differs from today's, on ``device`` (None: the entry's own); None if none."""
    from dmuon_tune.backends import backends
    from dmuon_tune.kernel_specs import kernels

    key = entry.key
    here = device or key.device
    spec = next((spec for spec in kernels(key.problem.op) if spec.name == key.kernel), None)
    if spec is None or spec.backend not in backends():
        return f"kernel: there is no {key.kernel} any more"
    if here != key.device:
        return "other device: " + _differences(key.device.limits(), here.limits())
    try:
        toolchain = backends()[spec.backend].toolchain(here)
    except ModuleNotFoundError as error:
        return f"other toolchain: {error}"
    if toolchain != key.toolchain:
        return "other toolchain: " + _differences(dict(key.toolchain.versions), dict(toolchain.versions))
    if spec.digest() != key.spec_digest:
        return f"other digest: code {key.spec_digest[:8]}, now {spec.digest()[:8]}"
    return None


def _differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {then.get(name)}, here {now.get(name)}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    )

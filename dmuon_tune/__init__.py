"""dmuon-tune: kernel autotuning for the Muon optimizer's Newton–Schulz step, and the optimizer that uses it."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

# A bare checkout keeps kernel_specs/, cache/ and runtime/ beside this package: let them import under its name.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "kernel_specs").is_dir():
    __path__.append(str(_CHECKOUT))

"""Portable code of a CPU kernel: a shared library, loaded where the CPU has all that it was compiled for."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dmuon_tune.portable import PortableCode, UnloadableCodeError

C_TYPES: dict[str, Any] = {"tensor": ctypes.c_void_p, "float32": ctypes.c_float}


class SharedLibraryFormat:
    name = "shared-library"

    def load(self, data: bytes, launch: dict[str, Any], path: Path) -> Callable[..., Any]:
        """``launch``: the function's ``symbol``, the kind of each of its ``arguments``, the CPU's ``machine`` and
        ``features``."""
        lacking = sorted(set(launch["features"]) - set(cpu_features()))
        if launch["machine"] != platform.machine() or lacking:
            what = launch["machine"] if launch["machine"] != platform.machine() else ", ".join(lacking[:4])
            raise UnloadableCodeError(f"it was compiled for a CPU with {what}, which this one is not")
        try:
            function = getattr(ctypes.CDLL(str(path)), launch["symbol"])
        except (OSError, AttributeError) as error:
            raise UnloadableCodeError(f"it cannot be loaded: {error}") from error
        kinds = launch["arguments"]
        function.argtypes, function.restype = [C_TYPES[kind] for kind in kinds], ctypes.c_int32
        tensors = [kind == "tensor" for kind in kinds]

        def call(*arguments: Any) -> None:
            passed = (
                value.data_ptr() if is_tensor else value for value, is_tensor in zip(arguments, tensors, strict=True)
            )
            if function(*passed):
                raise RuntimeError(f"{launch['symbol']} of {path.name} failed")

        return call


def library_code(library: Path, symbol: str, arguments: Sequence[str]) -> PortableCode:
    """A shared library compiled on and for this CPU; ``arguments`` are kinds of ``C_TYPES``."""
    launch = {
        "symbol": symbol, "arguments": list(arguments), "machine": platform.machine(), "features": cpu_features(),
    }
    return PortableCode(SharedLibraryFormat.name, library.read_bytes(), launch)


def cpu_features() -> list[str]:
    """The instruction sets of this CPU as Linux lists them, sorted; none where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    found = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return sorted(set(next(found, [])))


FORMAT = SharedLibraryFormat()

"""The Triton kernels' results in Triton's interpreter: the tests of two files in one process that interprets."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("test_momentum.py", "test_triton.py")


def version(distribution: str) -> tuple[int, ...]:
    """Major and minor version of what is installed."""
    return tuple(int(part) for part in importlib.metadata.version(distribution).split(".")[:2])


def test_interpreted_results() -> None:
    """Every element right, none unwritten, none out of range, the same twice: ragged shapes, both layouts."""
    pytest.importorskip("triton.runtime.interpreter", reason="this Triton has no interpreter")
    if version("triton") < (3, 7) and version("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", "in_the_interpreter", *FILES]
    switches = {"TRITON_INTERPRET": "1", "DMUON_TUNE_TEST_INTERPRETED": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # a process of its own, as triton.jit reads its switch once
        command, env={**os.environ, **switches},
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=280,
    )
    assert done.returncode == 0 and " skipped" not in done.stdout, done.stdout[-3000:]
    passed = [line.partition("::")[0] for line in done.stdout.splitlines() if " PASSED" in line]
    assert {Path(name).name for name in passed} == set(FILES), done.stdout[-3000:]

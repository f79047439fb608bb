"""Untuned choices are no part of a kernel's digest: improving one leaves what was tuned valid, another rule doesn't."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dmuon_tune.kernel_specs import kernels
from dmuon_tune.spec import KernelSpec

ROOT = Path(__file__).resolve().parents[2]
CHOOSERS = [spec for spec in kernels() if spec.heuristic or spec.seeds]
# In the copy every kernel's digest is taken, one module's code is changed, and the names of what changed are printed.
EDIT = """
import importlib, sys
from pathlib import Path
from dmuon_tune.kernel_specs import kernels

for name in sys.argv[1:]:
    before = {spec.name: spec.digest() for spec in kernels()}
    with Path(importlib.import_module(name).__file__).open("a") as file:
        file.write("CHANGED = 1\\n")
    print(name, *(spec.name for spec in kernels() if spec.digest() != before[spec.name]))
"""


def modules_of(spec: KernelSpec) -> set[str]:
    return {choice.__module__ for choice in (spec.heuristic, spec.seeds) if choice is not None}


def test_a_changed_choice_changes_no_digest_and_a_changed_rule_or_body_its_kernels(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")  # which one of the bodies imports
    for folder in ("dmuon_tune", "kernel_specs", "cache", "runtime"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    choices = set().union(*map(modules_of, CHOOSERS))
    rules = {spec.illegality.__module__ for spec in CHOOSERS}
    bodies = {f"dmuon_tune.kernel_specs._{name}" for name in ("cutedsl_walk", "tilelang_symmetric", "triton_products")}
    done = subprocess.run(
        [sys.executable, "-c", EDIT, *choices, *rules, *bodies],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )
    assert done.returncode == 0, done.stderr
    changed = {name: set(names) for name, *names in map(str.split, done.stdout.splitlines())}
    for module in choices:
        assert changed[module] == set(), f"{module} is part of a digest"
    for spec in CHOOSERS:
        assert spec.name in changed[spec.illegality.__module__]
    for module in bodies:
        assert changed[module] == {spec.name for spec in kernels() if module in spec.sources} != set()


@pytest.mark.parametrize("spec", CHOOSERS, ids=lambda spec: spec.name)
def test_choices_stand_outside_their_kernels_sources(spec: KernelSpec) -> None:
    assert not modules_of(spec) & set(spec.sources)

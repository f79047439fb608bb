"""The recipes of CONTRIBUTING.md work as they stand: each file is written into a copy of the checkout and used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dmuon_tune.backends import backends
from dmuon_tune.cache import Store

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("dmuon_tune", "kernel_specs", "cache", "runtime")
USE = """
import torch
from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.measure.build import compile_kernel, tuning_key
from dmuon_tune.measure.verify import verify
from dmuon_tune.problem import Problem

device, spec = fingerprint("cpu"), kernel("gram.inductor")
problem = Problem("gram", 2, 7, 7, 3, "float32", "float32", "col")
assert len(spec.legal_space(problem, device)) == 2
if backends()["inductor"].unavailable(device) is None:
    verdict = verify(compile_kernel(spec, problem, spec.Config(2), device).launch, ops()["gram"], problem, "cpu", 0)
    assert not verdict.failure, verdict
print(tuning_key(spec, problem, device).sha256)

scale = Problem("scale", 2, 3, 5, 1, "float32", "float32", "col")
verdict = verify(lambda x, y, alpha: torch.mul(x, alpha, out=y), ops()["scale"], scale, "cpu", 0)
assert not verdict.failure, verdict
"""


def recipes() -> dict[str, str]:
    """Path → text of every Python block of CONTRIBUTING.md that names a file in its first line."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return dict(re.findall(r"```python\n# (\S+)\n(.*?)```", text, flags=re.DOTALL))


@pytest.fixture
def extended_checkout(tmp_path: Path) -> Path:
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, text in recipes().items():
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def test_there_is_one_recipe_for_each() -> None:
    written = {"kernel_specs/gram_inductor.py", "kernel_specs/scale.py", "dmuon_tune/backends/inductor.py"}
    assert set(recipes()) == written


def test_the_files_work_without_editing_any_other(extended_checkout: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}  # for one kernel they take longer
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=extended_checkout, env=environment, capture_output=True, text=True,
        timeout=200, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[0-9a-f]{64}", done.stdout.strip())


def test_the_kernel_outside_the_repository_is_tuned_as_it_says(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (own,) = re.findall(r'^KERNEL = KernelSpec\(.* variant="pieces"\)$', text, flags=re.MULTILINE)
    (command,) = re.findall(r"^DMUON_TUNE_KERNEL_MODULES=my_gram PYTHONPATH=\S+ dmuon-tune (.*)$", text, re.MULTILINE)
    kernel = re.sub(r"^KERNEL = .*$", own, recipes()["kernel_specs/gram_inductor.py"], flags=re.MULTILINE)
    (tmp_path / "my_gram.py").write_text(kernel, encoding="utf-8")
    environment = {
        **os.environ, "DMUON_TUNE_KERNEL_MODULES": "my_gram", "DMUON_TUNE_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "dmuon_tune", *command.split(), "--trials", "4"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=200, check=False,
    )
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    with Store.open(tmp_path / "cache" / "cache.sqlite") as store:
        assert any(each.key.kernel == "gram.library.pieces" and each.measurement.ok for each in store.all_trials())


def test_every_dsl_says_what_build_returns() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| DSL | `build` returns |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == set(backends())


def test_the_files_pass_the_linter(extended_checkout: Path) -> None:
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    done = subprocess.run(
        [ruff, "check", "--no-cache", *recipes()], cwd=extended_checkout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout

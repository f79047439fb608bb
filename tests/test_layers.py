"""Imports point down the layers only; every module says its one job; no file outgrows a reader."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("kernel_specs", "cache", "runtime")  # top-level folders that import under dmuon_tune
L0 = (
    "__init__", "errors", "coefficients", "problem", "space", "device", "measurement", "spec", "recipe", "matrices",
    "processes", "checks", "words", "portable", "restarts", "starter",
)
L1 = ("kernel_specs", "cache", "backends", "models")
L2 = ("measure", "chains")
L3 = ("search", "runtime", "report")
L4 = ("cli", "__main__")
MAY_IMPORT = {
    **{unit: set(L0) for unit in L0},
    **{unit: {unit, *L0} for unit in L1},
    **{unit: {*L2, *L0, *L1} for unit in L2},
    **{unit: {unit, *L0, *L1, *L2} for unit in L3},
    **{unit: {*L0, *L1, *L2, *L3, *L4} for unit in L4},
}
MAX_LINES = 600


def module_name(path: Path) -> str:
    """Dotted name of a file (relative to the root); a package is named ``pkg.__init__`` so that ``.x`` resolves."""
    parts = path.with_suffix("").parts
    return ".".join(("dmuon_tune", *parts) if parts[0] in MAPPED else parts)


def unit_of(module: str) -> str:
    """The layer map's name for a module: the part after ``dmuon_tune.``, or ``__init__`` for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import anywhere in the source: lazy ones and TYPE_CHECKING's too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            # `from dmuon_tune import cache` and `from . import x` name modules after the import keyword
            from_top = target == "dmuon_tune"
            yield from ((node.lineno, f"{target}.{alias.name}" if from_top else target) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def violations(source: str, module: str) -> list[str]:
    """What this module imports against the layers, as ``line: reason``."""
    unit, found = unit_of(module), []
    for line, target in imports(source, module):
        top = target.split(".")[0]
        if top in MAPPED:
            found.append(f"{line}: imports bare {top}; import dmuon_tune.{top}")
        elif top == "dmuon_tune":
            imported = unit_of(target)
            # a name that is no unit is an attribute of dmuon_tune/__init__.py, such as __version__
            if imported in MAY_IMPORT and imported not in MAY_IMPORT[unit]:
                found.append(f"{line}: {unit} must not import {imported}")
        elif unit in L0 and top not in sys.stdlib_module_names:
            found.append(f"{line}: {unit} is standard library only, not {top}")
    return found


def sources(*folders: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


PACKAGES = sources("dmuon_tune", *MAPPED)


@pytest.mark.parametrize("path", PACKAGES, ids=str)
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    assert unit_of(module) in MAY_IMPORT, f"{path} has no place in the layer map"
    assert violations((ROOT / path).read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize("path", sources("dmuon_tune", *MAPPED, "tests", "examples", "tools"), ids=str)
def test_module_states_its_job_and_stays_readable(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring and docstring.splitlines()[0].endswith((".", ":")), f"{path}: first line must state its job"
    assert len(text.splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("dmuon_tune.problem", "import torch", "standard library only"),
        ("dmuon_tune.problem", "def f():\n    import torch.nn", "standard library only"),
        ("dmuon_tune.__init__", "from .backends import probe", "must not import backends"),
        ("dmuon_tune.cache.store", "from dmuon_tune.kernel_specs import ops", "must not import kernel_specs"),
        ("dmuon_tune.cache.store", "from ..backends import probe", "must not import backends"),
        ("dmuon_tune.cache.__init__", "from ..measure import build", "must not import measure"),
        ("dmuon_tune.search.tuner", "from dmuon_tune import runtime", "must not import runtime"),
        ("dmuon_tune.runtime.plan", "def f():\n    from dmuon_tune.search import tune", "must not import search"),
        ("dmuon_tune.runtime.plan", "if TYPE_CHECKING:\n    from dmuon_tune.cli import main", "must not import cli"),
        ("dmuon_tune.measure.build", "importlib.import_module('dmuon_tune.cli')", "must not import cli"),
        ("dmuon_tune.cli.main", "from cache import Store", "bare cache"),
        ("dmuon_tune.cli.main", "import runtime.plan", "bare runtime"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, reason: str) -> None:
    assert len(found := violations(source, module)) == 1 and reason in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dmuon_tune.problem", "from functools import cache\nfrom .errors import UsageError"),
        ("dmuon_tune.cache.store", "import sqlalchemy\nfrom .key import TuningKey\nfrom dmuon_tune import __version__"),
        ("dmuon_tune.runtime.plan", "from ..cache import Layers\nfrom dmuon_tune.measure.build import tuning_key"),
        ("dmuon_tune.cli.main", "from dmuon_tune import runtime, search"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert violations(source, module) == []

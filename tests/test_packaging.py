"""Wheel, editable install and bare checkout hold and import the same packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("kernel_specs", "cache", "runtime")
FOLDERS = ("dmuon_tune", *MAPPED)
IMPORT_ALL = (
    "import dmuon_tune.kernel_specs, dmuon_tune.cache, dmuon_tune.runtime, dmuon_tune.cli as last\n"
    "from dmuon_tune.kernel_specs import kernels, ops\n"
    "assert ops() and kernels()\n"
    "print(dmuon_tune.cache.__file__)"
)
SHIPPED = "dmuon_tune/starter/h200.sqlite"
READ_SHIPPED = (
    "from dmuon_tune.cache import Layers\n"
    "last = Layers.open({'HOME': '/nonexistent'}).descriptions()[-1]\n"
    "print(last['label'], last['state'], last['entries'] > 0, last['path'])"
)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")


def package_of(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return ".".join(("dmuon_tune", *parts) if parts[0] in MAPPED else parts)


def tree_modules() -> dict[str, Path]:
    """Installed path → file, for every module of the four folders."""
    found = {}
    for top in FOLDERS:
        for path in (ROOT / top).rglob("*.py"):
            inside = path.relative_to(ROOT)
            found[str(Path("dmuon_tune") / inside if top in MAPPED else inside)] = path
    return found


def python(code: str, cwd: Path, *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


def shipped_in(root: Path) -> str:
    """The last layer: the cache that the package ships."""
    return f"package starter-h200 ok True {root / SHIPPED}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads: builds leave their folders there, not in the real checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(target), str(checkout)], check=True, timeout=120)
    (built,) = target.glob("*.whl")
    return built


def test_package_list_equals_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == {package_of(path.parent) for path in tree_modules().values()}
    assert {package: folder for package, folder in project["tool"]["setuptools"]["package-dir"].items()} == {
        "dmuon_tune": "dmuon_tune", **{f"dmuon_tune.{name}": name for name in MAPPED}
    }


def test_every_package_has_an_init() -> None:
    folders = {path.parent for path in tree_modules().values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_all_extra_holds_every_runtime_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = set(extras["all"][0].removeprefix("dmuon-tune[").removesuffix("]").split(","))
    assert named == set(extras) - {"all", "bench", "quack", "dev"}  # a peer's kernels are asked for by name


def test_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == {*tree_modules(), "dmuon_tune/py.typed", SHIPPED}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "dmuon-tune = dmuon_tune.cli:main" in entry_points
    assert "[dmuon_tune.caches]\nstarter-h200 = dmuon_tune.starter:h200" in entry_points


def test_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    assert last_line(python(IMPORT_ALL, tmp_path, path=target)) == str(target / "dmuon_tune/cache/__init__.py")
    assert last_line(python(READ_SHIPPED, tmp_path, path=target)) == shipped_in(target)


def test_editable_install_imports(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    prefix = tmp_path / "prefix"
    subprocess.run(
        [*PIP, "install", *OFFLINE, "--ignore-installed", "--prefix", str(prefix), "--editable", str(checkout)],
        check=True, timeout=120,
    )
    site = sysconfig.get_path("purelib", vars={"base": str(prefix), "platbase": str(prefix)})
    # This environment may hold an editable install of its own: its finder has the same name and must not answer.
    code = (
        "import site, sys\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if '__editable__' not in str(finder)]\n"
        "for name in [name for name in sys.modules if name.startswith('__editable__')]: del sys.modules[name]\n"
        f"sys.path.insert(0, {site!r})\nsite.addsitedir({site!r})\n"
    )
    assert last_line(python(code + IMPORT_ALL, tmp_path)) == str(checkout / "cache/__init__.py")
    assert last_line(python(code + READ_SHIPPED, tmp_path)) == shipped_in(checkout)


def test_bare_checkout_imports(checkout: Path, tmp_path: Path) -> None:
    assert last_line(python(IMPORT_ALL, tmp_path, path=checkout)) == str(checkout / "cache/__init__.py")
    assert last_line(python(READ_SHIPPED, tmp_path, path=checkout)) == shipped_in(checkout)


@pytest.mark.parametrize("name", MAPPED)
def test_bare_name_is_refused(name: str, checkout: Path) -> None:
    result = python(f"import {name}", checkout)
    assert result.returncode == 1
    assert f"ImportError: import dmuon_tune.{name}" in result.stderr


def test_a_users_own_cache_module_is_not_shadowed(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "cache.py").write_text('WHOSE = "theirs"\n', encoding="utf-8")
    code = "import cache, dmuon_tune.cache as ours\nprint(cache.WHOSE, ours.__name__)"
    assert last_line(python(code, tmp_path, path=checkout)) == "theirs dmuon_tune.cache"

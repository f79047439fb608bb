"""A container's conditions: a read-only root, a user without passwd entry or HOME, no compiler, the bundle in /opt."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmuon_tune import kernel_specs
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store, contents_of, write_bundle
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Recipe, chain

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "examples" / "container" / "Dockerfile"
GROUP = Group(1, 16, 64)
USER = 4242
MOUNTS = (  # PyTorch's own optimizers need some temporary folder
    'mount --bind "$1" /opt && mount -t tmpfs -o mode=1777 none "$TMPDIR" && mount -o remount,ro,bind / && '
    'shift && exec "$@"'
)
TRAIN = """
import json, os, sys, tempfile
import torch
torch.set_num_threads(1)
written = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(arguments[0]) != os.devnull:
            written.append([event, str(arguments[0])])
    elif event in ("os.mkdir", "os.rename", "os.remove", "sqlite3.connect", "subprocess.Popen"):
        written.append([event, str(arguments[0])])
sys.addaudithook(watch)
import dmuon_tune.cli, dmuon_tune.cache, dmuon_tune.search
from dmuon_tune.backends import backends
from dmuon_tune.cache import Layers
from dmuon_tune.kernel_specs import kernels, ops
from dmuon_tune.runtime import Muon
backends(), kernels(), ops()
at_import = list(written)
import torch._dynamo  # what is imported late must be so before Python's own folders, perhaps root's, close
def look(environ):
    with Layers.open(environ) as layers:
        assert sum(not label.startswith("package") for label, _ in layers.entries(None, None)) == 6
        return [(each["label"], each["state"]) for each in layers.descriptions()][:3]
look({"DMUON_TUNE_CACHE_PATH": sys.argv[2]})
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
weight = torch.nn.Parameter(torch.randn(16, 64))
weight.grad = torch.randn(16, 64)
before = weight.detach().clone()
optimizer = Muon([weight], lr=0.1)
optimizer.step()
found = {"at_import": at_import, "moved": not torch.equal(weight, before), "homes": {}, "refused": []}
found["remembered"] = len(os.listdir(f"{tempfile.gettempdir()}/dmuon-tune-{sys.argv[1]}/checked"))
found["rows"] = [(row["origin"], row["layer"]) for plan in optimizer.plan() for row in plan.rows()]
for home in (None, "/"):
    environ = {} if home is None else {"HOME": home}
    environ["DMUON_TUNE_CACHE_PATH"] = sys.argv[2]
    found["homes"][str(home)] = look(environ)
for path in ("/opt/dmuon-tune/x", "/opt/dmuon-tune/cache.sqlite", "/x"):
    try:
        open(path, "a").close()
    except OSError:
        found["refused"].append(path)
print(json.dumps(found))
"""


def folder_for_others(name: str) -> Iterator[Path]:
    """A folder that other users may read, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix=f"dmuon-tune-{name}-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def opt() -> Iterator[Path]:
    yield from folder_for_others("opt")


@pytest.fixture
def temporary() -> Iterator[Path]:
    yield from folder_for_others("tmp")


def ship(folder: Path) -> None:
    """A bundle of this device's results, unpacked as a Dockerfile's ADD does."""
    with Store.open(folder / "tuned.sqlite") as store:
        for problem in chain(GROUP, "gram", "float32"):
            key = tuning_key(kernel_specs.kernel(f"{problem.op}.library"), problem, fingerprint("cpu"))
            store.record(key, {"entry": "addmm"}, Measurement.from_samples([10.0], 1e-6, {}), {})
        store.put_recipe(fingerprint("cpu"), Recipe(GROUP, "gram", "float32", cost_us=70.0))
        write_bundle(folder / "muon.bundle", contents_of(store).only_winners())
    with tarfile.open(folder / "muon.bundle") as tar:
        tar.extractall(folder / "dmuon-tune", filter="data")
    named = folder / "größe ü" / "wal.sqlite"
    named.parent.mkdir()
    shutil.copy(folder / "tuned.sqlite", named)
    connection = sqlite3.connect(named)
    connection.execute("PRAGMA journal_mode=WAL")  # as a killed process leaves it: readers would need side files
    connection.close()
    os.utime(named, (4e9, 4e9))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount and become another user")
def test_a_read_only_container_trains_with_the_bundle(opt: Path, temporary: Path) -> None:
    if any(Path(path).resolve().is_relative_to("/opt") for path in (ROOT, sys.prefix, sys.base_prefix)):
        pytest.skip("what runs this test lies in /opt, where the bundle is mounted")
    environ = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8",
        "TMPDIR": str(temporary),
    }
    can = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNTS, "sh", opt, "true"], env=environ, capture_output=True, text=True
    )
    if can.returncode:
        pytest.skip(f"mounts are not permitted here: {can.stderr.strip()}")
    ship(opt)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNTS, "sh", opt, sys.executable, "-c", TRAIN, str(USER),
         "/opt/größe ü/wal.sqlite"],
        env=environ, cwd="/", capture_output=True, text=True, timeout=120, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing to warn of"
    found = json.loads(done.stdout)
    assert found["moved"] and set(map(tuple, found["rows"])) == {("tuned", "site")}
    assert found["remembered"] == 3, "every shipped kernel was checked once"
    assert found["at_import"] == [], "importing writes nothing and starts nothing"
    assert found["refused"] == ["/opt/dmuon-tune/x", "/opt/dmuon-tune/cache.sqlite", "/x"]
    assert found["homes"] == {home: [["path", "ok"], ["user", "absent"], ["site", "ok"]] for home in ("None", "/")}
    assert sorted(os.listdir(opt / "dmuon-tune")) == ["bundle.json", "cache.sqlite"]
    assert os.listdir(opt / "größe ü") == ["wal.sqlite"]


def test_the_dockerfile_copies_what_the_package_is_made_of() -> None:
    copied = re.findall(r"^(?:COPY|ADD) (.+) \S+$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for line in copied for name in line.split()} - {"examples/container/muon.bundle"}
    assert all((ROOT / name).exists() for name in named)
    assert {"dmuon_tune", "cache", "runtime", "kernel_specs", "pyproject.toml", "README.md", "LICENSE"} <= named

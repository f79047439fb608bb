"""A DSL that is installed but does not import, or not in time: said, never waited for, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dmuon_tune.backends import backends
from dmuon_tune.backends.imports import import_failures
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store

from .conftest import Run

ROOT = Path(__file__).resolve().parents[2]
STUCK = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
with open({place!r}, "w") as file:
    file.write(str(os.getpid()))
os.rename({place!r}, {place!r} + ".done")
time.sleep(600)
"""

needs_tilelang = pytest.mark.skipif(
    backends()["tilelang"].unavailable(fingerprint("cpu")) is not None, reason="TileLang cannot run here"
)


def broken(tmp_path: Path, code: str) -> Path:
    """A folder for the import path whose TileLang runs ``code``."""
    package = tmp_path / "site" / "tilelang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    return package.parent


@needs_tilelang
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise OSError('libcuda.so.1: cannot open\\nshared object file')", "OSError: libcuda.so.1: cannot open"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os.abort()", "signal 6 (Aborted)"),
    ],
)
def test_the_reason_is_the_exceptions_first_line(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(broken(tmp_path, code)))
    assert import_failures(["library", "tilelang"]) == {
        "tilelang": f"tilelang is installed, but importing it fails: {said}; reinstall it"
    }


@needs_tilelang
def test_doctor_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(broken(tmp_path, "raise ImportError('no libtvm')")))
    result = run("doctor", "--device", "cpu", "--format", "json")
    found = {row["name"]: row for row in result.json["backends"]}
    assert not found["tilelang"]["available"] and "ImportError: no libtvm" in found["tilelang"]["reason"]
    assert found["library"]["available"]


@needs_tilelang
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_library_is_measured_before_a_stuck_import_which_ends_with_its_parent(
    number: signal.Signals, own_cache: Path, tmp_path: Path
) -> None:
    place = tmp_path / "importing"
    path = [str(broken(tmp_path, STUCK.format(place=str(place)))), str(ROOT), *sys.path]
    tuning = subprocess.Popen(
        [sys.executable, "-m", "dmuon_tune", "tune", "--shapes", "2x8x24", "--device", "cpu", "--backends", "tilelang"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, stderr=subprocess.PIPE, text=True,
    )
    done = place.with_name("importing.done")
    while not done.exists():
        assert tuning.poll() is None
        time.sleep(0.1)
    tuning.send_signal(number)
    _, errors = tuning.communicate(timeout=30)
    assert tuning.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), errors
    importing, deadline = int(done.read_text()), time.monotonic() + 30
    while Path(f"/proc/{importing}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{importing}").exists()
    with Store.open(own_cache, read_only=True) as store:  # one configuration of each product
        assert sorted(trial.key.kernel for trial in store.all_trials()) == [
            "apply.library", "gemm_symmetric.library", "gram.library"
        ]


@needs_tilelang
def test_without_time_there_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(broken(tmp_path, "import time; time.sleep(600)")))
    assert import_failures(["tilelang"], timeout_s=0.5) == {}

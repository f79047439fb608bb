"""Programs in processes forked from one that has imported PyTorch: as ``python ...`` runs them, but seconds sooner.

What a program reads of its environment while it imports was read before, what it can import is what the tests can, and
what C code does at the end of a process (atexit, destructors) is left out.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
AFTER_FAILURE_S = 60.0  # that others have to end when one has failed
PRELOADED = [  # the compiler because optimizers and DTensors import it at their first use
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint",
    "torch._dynamo", "torch._inductor.utils", "torch.profiler", "highspy", "pytest",
    "dmuon_tune.runtime.distributed.gather", "dmuon_tune.search",
    *(f"dmuon_tune.kernel_specs.{path.stem}" for path in sorted((ROOT / "kernel_specs").glob("[a-z]*.py"))),
    *(f"dmuon_tune.backends.{path.stem}" for path in sorted((ROOT / "dmuon_tune/backends").glob("[a-z]*.py"))),
]


def context() -> ForkServerContext:
    """Its processes are forked from one that has imported PyTorch, and import what this one can."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    found = get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


class Program:
    """``python *command``, running in ``folder`` with ``environ`` alone."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self.command = list(command)
        self._streams = tempfile.TemporaryDirectory(prefix="dmuon-tune-program-")
        self._out, self._err = (Path(self._streams.name, name) for name in ("out", "err"))
        places = tuple(map(str, (folder, self._out, self._err)))
        self._process = context().Process(target=_become, args=(self.command, dict(environ), *places))
        self._process.start()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def has_failed(self) -> bool:
        return bool(self._process.exitcode)

    @property
    def outcome(self) -> tuple[int | None, str, str]:
        """Exit code, None while it runs, and what it has printed to stdout and stderr."""
        out, err = (path.read_text() if path.exists() else "" for path in (self._out, self._err))
        return self._process.exitcode, out, err

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def close(self) -> None:
        """End it where it has not ended: at first so that a launcher ends its ranks."""
        self._process.terminate()
        self._process.join(10)
        self.kill()
        self._streams.cleanup()


def run(
    *command: str, environ: Mapping[str, str], folder: Path, timeout_s: float = 200
) -> subprocess.CompletedProcess[str]:
    """How ``python *command`` ends."""
    (done,) = run_all([command], [environ], folder, timeout_s)
    return done


def run_ranks(
    size: int, *command: str, environ: Mapping[str, str], folder: Path, timeout_s: float = 200
) -> list[subprocess.CompletedProcess[str]]:
    """How each of ``size`` ranks ends, in the environment that torchrun gives to them."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent keeps one
    shared = {
        **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    every = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return run_all([command] * size, every, folder, timeout_s)


def run_all(
    commands: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]], folder: Path, timeout_s: float
) -> list[subprocess.CompletedProcess[str]]:
    """How several end that run side by side; TimeoutExpired, with what all have printed, where one does not, which has
    less time once another has failed."""
    programs, deadline = list[Program](), time.monotonic() + timeout_s
    try:
        for command, environ in zip(commands, environs, strict=True):
            programs.append(Program(command, environ, folder))
        is_over = False
        while time.monotonic() < deadline and any(program.is_alive for program in programs):
            if not is_over and any(program.has_failed for program in programs):
                is_over, deadline = True, min(deadline, time.monotonic() + AFTER_FAILURE_S)
            time.sleep(0.02)
        done = [program.outcome for program in programs]
        if any(code is None for code, _, _ in done):
            outs, errs = ("\n".join(texts) for texts in list(zip(*done, strict=True))[1:])
            raise subprocess.TimeoutExpired(list(commands[0]), timeout_s, outs, errs)
        return [
            subprocess.CompletedProcess(list(command), code or 0, out, err)
            for command, (code, out, err) in zip(commands, done, strict=True)
        ]
    finally:
        for program in programs:
            program.close()


def settle() -> None:
    """What a forked process does first: its garbage collections leave out what was imported before it."""
    gc.freeze()


def _become(command: list[str], environ: dict[str, str], folder: str, out: str, err: str) -> None:
    """What the interpreter does with its command line, to its exit code."""
    settle()
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.path[:0] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    code = _run(command)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _run(command: list[str]) -> int:
    kind, *rest = command
    sys.argv = rest if kind in ("-m", "-c") else command
    try:
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.path.insert(0, str(Path(kind).parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0

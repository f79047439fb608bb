"""Real workers, real misbehaviour: every job ends as the right Measurement and the next one still runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.measure.device_lock import device_lock
from dmuon_tune.measure.executor import Executor, Job
from dmuon_tune.measure.job import ChainJob
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group
from dmuon_tune.search.start import untuned_chain

PROBLEM = Problem("gram", 3, 33, 33, 70, "float32", "float32")
EXPECTED = {  # status and a part of the log
    "compile": ("compile_error", "written to fd 2"),
    "silent": ("wrong_result", "not finite or not written"),
    "nan": ("wrong_result", "not finite or not written: 1 of 3267 output elements"),
    "values": ("wrong_result", "at (2, 0, 1)"),
    "asymmetric": ("wrong_result", "asymmetric"),
    "scalar": ("wrong_result", "relative error"),
    "input": ("wrong_result", "changed its inputs"),
    "overrun": ("wrong_result", "outside its output"),
    "random": ("wrong_result", "two runs on the same inputs differ"),
    "launch": ("launch_error", "RuntimeError: too many resources requested"),
    "hang": ("timeout", "still running after 2 s"),
    "kill": ("crashed", "last words"),
    "exit": ("crashed", "process died while compiling: exit code 7"),
    "slow": ("ok", ""),
}


def job(kernel: str, config: dict[str, str] | None = None) -> Job:
    return Job(kernel, PROBLEM, config or {}, "cpu", seed=1)


def test_every_misbehaviour_is_a_measurement(test_kernels: None, capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [job(f"gram.library.bad_{name}") for name in EXPECTED]
    jobs += [job("gram.library", {"entry": "baddbmm"}), job("gram.library", {"entry": "no such field", "x": "y"})]
    hangs = [each for each in jobs if each.kernel_name.endswith("hang")]
    outcomes = {}
    for limit_s, chosen in ((60, [each for each in jobs if each not in hangs]), (2, hangs)):  # a busy machine is slow
        with Executor("cpu", run_timeout_s=limit_s) as executor:
            outcomes |= {done.kernel_name + str(done.config): measurement for done, measurement in executor.run(chosen)}
    assert len(outcomes) == len(jobs)
    for name, (status, text) in EXPECTED.items():
        measurement = outcomes[f"gram.library.bad_{name}{{}}"]
        assert measurement.status == status, (name, measurement)
        assert text in measurement.log, (name, measurement.log)
    assert "compiler says: line 7" in outcomes["gram.library.bad_compile{}"].log
    assert (outcomes["gram.library.bad_values{}"].max_rel_err or 0) > 1e-3
    slow = outcomes["gram.library.bad_slow{}"]
    assert slow.median_us is not None and 20_000 <= slow.median_us < 300_000
    library = outcomes["gram.library{'entry': 'baddbmm'}"]
    assert library.ok and len(library.samples) >= 3 and library.max_rel_err is not None
    assert library.log == "" and library.resources["launches_per_window"] >= 1
    assert outcomes["gram.library{'entry': 'no such field', 'x': 'y'}"].status == "compile_error"
    assert capfd.readouterr() == ("", "")


def processes_of(executor: Executor, *jobs: Job | ChainJob) -> list[int]:
    """Which processes run them, beside each other."""
    for each in jobs:
        executor.submit(each)
    found = [worker._process.pid for worker in executor._busy]
    for _ in jobs:
        ended = executor.wait()
        assert ended is not None and isinstance(ended[1], Measurement) and ended[1].ok
    return found


def test_warmed_processes_are_used_where_most_is_compiled_and_replaced_once_dead() -> None:
    def children() -> set[int]:
        me = os.getpid()
        return {int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()} - before

    before: set[int] = set()
    before = children()
    with Executor("cpu", workers=2) as executor:
        executor.warm(5)
        warmed = children()
        assert len(warmed) == 2 and executor.in_flight == 0
        specs = [spec for spec in kernels() if spec.backend == "library"]
        recipe = untuned_chain(Group(1, 8, 24), "float32", specs, fingerprint("cpu"))
        assert recipe is not None
        gram, step, apply = (Job(pick.kernel, pick.problem, pick.config, "cpu", 1) for pick in recipe.picks)
        first, second = processes_of(executor, gram, step)
        assert processes_of(executor, gram, apply) == [first, second]
        assert processes_of(executor, step) == [second] and processes_of(executor, gram) == [first]
        assert processes_of(executor, ChainJob(recipe, "cpu", 1)) == [second], "two of its three kernels"
        assert children() == warmed == {first, second}
        for pid in warmed:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not set(processes_of(executor, gram)) & warmed
    assert not children()


def test_waiting_for_the_device_is_no_timeout_and_closing_kills(test_kernels: None) -> None:
    with Executor("cpu", compile_timeout_s=3.0, run_timeout_s=60) as executor:
        with device_lock("cpu"):
            executor.submit(job("gram.library", {"entry": "baddbmm"}))
            while executor._busy[0]._phase != "waiting":
                assert executor.wait(timeout_s=0.1) is None
            assert executor.wait(timeout_s=4.0) is None
        outcome = executor.wait()
        assert outcome is not None and outcome[1].ok
        executor.submit(job("gram.library.bad_hang"))
        assert not executor.has_room
        with pytest.raises(RuntimeError, match="busy"):
            executor.submit(job("gram.library.bad_hang"))
        assert executor.wait(timeout_s=0.5) is None
        begin = time.monotonic()
    assert time.monotonic() - begin < 5
    assert executor.in_flight == 0


STDIN_SCRIPT = """
import os, sys
from dmuon_tune.measure.executor import Executor, Job
from dmuon_tune.problem import Problem
job = Job("gram.library.bad_hang", Problem("gram", 1, 8, 8, 8, "float32", "float32"), {}, "cpu", 0)
executor = Executor("cpu")
executor.submit(job)
while executor._busy[0]._phase != "running":
    executor.wait(timeout_s=0.1)
print(executor._busy[0]._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="death with the parent while busy needs prctl")
def test_workers_of_a_script_on_stdin_start_and_die_with_it(test_kernels: None) -> None:
    """No __main__ guard, no file to import again; the parent is SIGKILLed while its worker hangs in a kernel."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-"], input=STDIN_SCRIPT, capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == -9, done.stderr
    worker = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 5
    while _is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(worker)


def _is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

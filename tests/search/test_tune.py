"""Whole tuning runs with real workers: results kept at once, nothing measured twice, nothing lost to a kill."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import text

from dmuon_tune import kernel_specs
from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import CacheEntry, Store
from dmuon_tune.errors import NoLegalConfigError, UsageError
from dmuon_tune.kernel_specs import EXTRA_MODULES_VARIABLE, kernel, kernels
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.executor import _Worker
from dmuon_tune.measure.job import Outcome
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe, chain, first_launch
from dmuon_tune.search import TuneOptions, recipes, tune
from dmuon_tune.search.kernel_search import usable_kernels
from dmuon_tune.search.options import ChainReport, TuneReport
from dmuon_tune.search.problem_search import problem_search
from dmuon_tune.search.recipes import CLOSE_OWN, ChainSearch, estimates, keep_recipe
from dmuon_tune.search.recipes import Tuned as TunedProduct
from dmuon_tune.search.shares import chains_share_s, races_share_s
from dmuon_tune.space import config_json

from .. import forked

pytestmark = pytest.mark.usefixtures("lasting_workers")

GROUPS = [Group(1, 8, 24)]
ONLY_LIBRARY = TuneOptions(device="cpu", backends=("library",))
WITH_HANGS = replace(ONLY_LIBRARY, run_timeout_s=10)  # for each kernel that hangs; a busy machine's others need less


class Recorder:
    """Keeps a run's events; raises where asked, as Ctrl-C does."""

    def __init__(self, interrupt_after: int | None = None, interrupt_after_chains: int | None = None) -> None:
        self.total = 0
        self.chains: list[Recipe] = []
        self._interrupt_after_chains = interrupt_after_chains
        self.tried: list[tuple[Problem, str, str]] = []
        self.kept: list[Measurement] = []
        self.races: dict[Problem, str] = {}
        self.is_finished = False
        self._interrupt_after = interrupt_after

    def started(self, total: int, budget_s: float | None, races: int) -> None:
        self.total = total

    def settled(self, count: int) -> None:
        self.total -= count

    def trying(self, problem: Problem, kernel: str, config: dict[str, Any]) -> None:
        self.tried.append((problem, kernel, str(sorted(config.items()))))

    def measured(
        self, problem: Problem, kernel: str, config: dict[str, Any], measurement: Measurement, best_us: float | None
    ) -> None:
        self.kept.append(measurement)
        if len(self.kept) == self._interrupt_after:
            raise KeyboardInterrupt

    def reused(self, count: int) -> None:
        self.total -= count

    def waiting(self, count: int, hosts: Sequence[str]) -> None:
        self.waited_for = hosts

    def races_started(self, races: int, left_s: float | None) -> None:
        pass

    def raced(self, problem: Problem, kernel: str, measurement: Measurement) -> None:
        self.races[problem] = kernel

    def chains_started(self, groups: int, left_s: float | None) -> None:
        self.chained_groups = groups

    def timed(self, recipe: Recipe, measurement: Measurement, best_us: float | None) -> None:
        self.chains.append(recipe)
        if len(self.chains) == self._interrupt_after_chains:
            raise KeyboardInterrupt

    def finished(self) -> None:
        self.is_finished = True


def finished_trials(store: Store) -> set[tuple[Problem, str, str]]:
    return {(t.key.problem, t.key.kernel, str(sorted(t.config.items()))) for t in store.all_trials()}


def quiet(store: Store) -> None:
    """Let no timing count as disturbed, else the next run takes it again: a busy machine disturbs any."""
    with store._writing() as session:
        for table in ("trials", "chains"):
            session.execute(text(f"UPDATE dmuon_{table} SET resources = json_remove(resources, '$.contended')"))


PLANTED = {  # how each of its configurations ends, and how many there are
    "bad_ragged": ("wrong_result", 11), "bad_half": ("wrong_result", 11), "bad_infinite": ("wrong_result", 11),
    "bad_memory": ("launch_error", 11), "bad_nan": ("wrong_result", 1), "bad_compile": ("compile_error", 1),
    "bad_crash": ("crashed", 1), "bad_zero": ("crashed", 1), "bad_address": ("crashed", 1), "bad_hang": ("timeout", 1),
}
BESIDE = {"bad_exit": ("crashed", 1), "bad_slow": ("ok", 1), "bad_values": ("wrong_result", 1)}


def test_a_finalist_that_fails_in_its_race_is_kept_as_that_and_nothing_says_that_it_won(
    misbehaving: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = {"late_exit": "crashed", "late_hang": "timeout", "late_raise": "launch_error"}
    monkeypatch.setenv(EXTRA_MODULES_VARIABLE, ",".join([*late, "late_never"]))
    groups = [Group(1, 256, 1024)]  # the library takes longer than these kernels seem to
    with Store.open(tmp_path / "cache.sqlite") as store:
        first = tune(groups, store, WITH_HANGS, events := Recorder())
        statuses = {trial.key.kernel.rpartition(".")[2]: trial.measurement.status for trial in store.all_trials()}
        assert {**late, "late_never": "ok"}.items() <= statuses.items()
        winners = [*events.races.values(), *(report.winner.key.kernel for report in first.problems if report.winner)]
        assert len(first.problems) <= len(winners) and not any(kernel.rpartition(".")[2] in late for kernel in winners)
        quiet(store)
        assert tune(groups, store, WITH_HANGS).measured == 0


def test_fifty_bad_candidates_never_win_are_kept_and_the_second_run_measures_nothing(
    misbehaving: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(EXTRA_MODULES_VARIABLE, ",".join([*PLANTED, *BESIDE]))
    assert sum(count for _, count in PLANTED.values()) == 50
    groups, options = [Group(1, 9, 21)], replace(WITH_HANGS, trials=100, patience=None)
    with Store.open(tmp_path / "cache.sqlite") as store:
        first = tune(groups, store, options, events := Recorder())
        assert first.complete and events.is_finished
        assert first.measured == len(events.kept) == events.total == len(store.all_trials())
        assert first.reused == 0 and first.unavailable == {}
        ended: dict[str, list[Measurement]] = {}
        for trial in store.all_trials():
            ended.setdefault(trial.key.kernel.rpartition(".")[2], []).append(trial.measurement)
        for name, (status, count) in {**PLANTED, **BESIDE}.items():
            assert [each.status for each in ended[name]] == count * [status], name
            assert status == "ok" or all(each.log for each in ended[name]), name
        gram = next(report for report in first.problems if report.problem.op == "gram")
        assert gram.statuses == {"ok": 3, "compile_error": 1, "crashed": 4, "timeout": 1, "wrong_result": 35,
                                 "launch_error": 11}
        for report in first.problems:
            assert report.winner is not None and report.library is not None
            assert report.winner.key.kernel == f"{report.problem.op}.library"  # bad_slow is right but slow
            assert report.winner.measurement.median_us is not None
        assert [recipe.group for recipe in first.recipes] == groups and first.recipes[0].timed
        assert store.recipe(first.device, groups[0], "float32") == first.recipes[0]
        best: CacheEntry | None = store.best(gram.winner.key) if gram.winner else None
        assert best is not None and best.validation
        assert {"tool", "torch", "device", "seed", "date"} <= best.provenance.keys()

        quiet(store)
        again = tune(groups, store, options, second := Recorder())
        assert again.measured == 0 and again.complete and again.reused == first.measured
        assert second.tried == [] and again.recipes == first.recipes
        assert [report.winner and report.winner.config for report in again.problems] == [
            report.winner and report.winner.config for report in first.problems
        ]


def test_the_library_and_untuned_configurations_come_first_in_every_problem(misbehaving: None) -> None:
    device = fingerprint("cpu")
    specs = [spec for spec in kernels() if spec.backend == "library"]
    problem = Problem("gram", 1, 8, 8, 24, "float32", "float32")
    with Store.open("sqlite://") as store:
        search = problem_search(problem, specs, device, store, 1, 0)
        seeds = search.seeds()
    assert seeds[0].kernel.key.kernel == "gram.library"
    assert {seed.kernel.key.kernel for seed in seeds} == {spec.name for spec in specs if spec.op == "gram"}
    assert all(seed.config == seed.kernel.untuned for seed in seeds)
    assert search.propose() is None  # one trial asked, and the seeds exceed it


def test_tilelang_is_measured_where_it_can_run(tmp_path: Path) -> None:
    if "tilelang" not in backends():
        pytest.skip("no TileLang backend")
    reason = backends()["tilelang"].unavailable(fingerprint("cpu"))
    if reason:
        pytest.skip(reason)
    options = TuneOptions(device="cpu", backends=("tilelang",), trials=2)
    with Store.open(tmp_path / "cache.sqlite") as store:
        report = tune([Group(1, 16, 40)], store, options)
        for problem in report.problems:
            measured = {trial.key.kernel for trial in store.all_trials() if trial.measurement.ok}
            assert f"{problem.problem.op}.tilelang" in measured, problem.statuses
            assert problem.library is not None


def test_an_interrupt_passes_through_and_keeps_what_was_measured(tmp_path: Path) -> None:
    with Store.open(tmp_path / "cache.sqlite") as store:
        recorder = Recorder(interrupt_after=2)
        with pytest.raises(KeyboardInterrupt):
            tune(GROUPS, store, ONLY_LIBRARY, recorder)
        assert recorder.is_finished
        done = finished_trials(store)
        assert len(done) == 2
        rest = tune(GROUPS, store, ONLY_LIBRARY, second := Recorder())
        assert not done & set(second.tried)
        assert rest.measured == recorder.total - 2 and rest.complete


def test_a_spent_budget_ends_the_run_as_incomplete(tmp_path: Path) -> None:
    with Store.open(tmp_path / "cache.sqlite") as store:
        report = tune(GROUPS, store, replace(ONLY_LIBRARY, budget_s=1e-6))
        assert not report.complete and report.measured == 0
        assert all(problem.winner is None for problem in report.problems) and report.recipes == []


BATCH = [Group(3, 12, 16)]


@dataclass(frozen=True)
class Tuned:
    """What a run over BATCH that timed chains of every form reported, and a copy of its cache for one test."""

    report: TuneReport
    events: Recorder
    cache: Path


@pytest.fixture(scope="module")
def tuned_once(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    path, events = tmp_path_factory.mktemp("tuned") / "cache.sqlite", Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmuon_tune.search.recipes.HOPELESS", 1e9)
        with Store.open(path) as store:
            report = tune(BATCH, store, ONLY_LIBRARY, events)
            quiet(store)
    return Tuned(report, events, path)


@pytest.fixture
def tuned(tuned_once: Tuned, tmp_path: Path) -> Tuned:
    return replace(tuned_once, cache=Path(shutil.copy(tuned_once.cache, tmp_path / "cache.sqlite")))


def test_whole_chains_decide_the_recipe_and_are_not_timed_again(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmuon_tune.search.recipes.HOPELESS", 1e9)
    first, events = tuned.report, tuned.events
    with Store.open(tuned.cache) as store:
        (recipe,) = first.recipes
        trials = store.chain_trials(first.device)
        assert first.chains == ChainReport(timed=len(events.chains)) and len(trials) == len(events.chains)
        assert {trial.recipe.form for trial in trials} == {"gram", "plain"}
        assert all(trial.measurement.ok and trial.measurement.max_rel_err for trial in trials)
        whole = [trial for trial in trials if trial.recipe.group == BATCH[0]]
        best = min(trial.measurement.median_us or 0 for trial in whole)
        assert recipe.timed and recipe.cost_us is not None and best <= recipe.cost_us <= 1.01 * best
        assert [batch for batch, _ in recipe.batch_costs] == [1, 2]
        assert {pick.kernel for pick in recipe.picks} <= {"gram.library", "gemm_symmetric.library", "apply.library"}
        assert store.recipe(first.device, BATCH[0], "float32") == recipe

        again = tune(BATCH, store, ONLY_LIBRARY, second := Recorder())
        assert second.chains == [] and again.recipes == [recipe]
        assert again.chains == ChainReport(reused=len(events.chains))


def test_chains_cut_short_are_gone_on_with(tmp_path: Path) -> None:
    with Store.open(tmp_path / "cache.sqlite") as store:
        with pytest.raises(KeyboardInterrupt):
            tune(BATCH, store, ONLY_LIBRARY, Recorder(interrupt_after_chains=1))
        quiet(store)
        (kept,) = store.chain_trials()
        assert store.recipes() == []
        no_time = tune(BATCH, store, replace(ONLY_LIBRARY, budget_s=1e-6))
        assert no_time.complete and no_time.chains == ChainReport(reused=1, unfinished=1)
        assert no_time.recipes[0].timed  # by the one chain that is kept
        rest = tune(BATCH, store, ONLY_LIBRARY, recorder := Recorder())
        assert kept.recipe not in recorder.chains and rest.chains.unfinished == 0
        assert rest.chains.reused == 1 and rest.chains.timed == len(recorder.chains) > 1


def test_a_budget_without_time_for_chains_leaves_an_estimate_or_the_timed_recipe(tuned: Tuned) -> None:
    timed = tuned.report.recipes[0]
    with Store.open(tuned.cache) as store:
        with store._writing() as session:
            session.execute(text("DELETE FROM dmuon_chains"))
        spent = replace(ONLY_LIBRARY, budget_s=1e-6)
        assert tune(BATCH, store, spent).recipes == [timed]  # of today's kernels: better than an estimate
        slow = search_cut_short(BATCH[0], ok(2 * (timed.cost_us or 0)))
        assert keep_recipe(slow, kernels(), fingerprint("cpu"), store) == timed
        stale = replace(timed, picks=(replace(timed.picks[0], key="older code"), *timed.picks[1:]))
        store.put_recipe(fingerprint("cpu"), stale)
        report = tune(BATCH, store, spent)
        assert report.chains == ChainReport(unfinished=1)
        assert not report.recipes[0].timed and report.recipes[0].cost_us
        assert store.recipes() == report.recipes


def search_cut_short(group: Group, first: Measurement) -> ChainSearch:
    """A search cut short after its first chain, on made-up times of products."""
    device = fingerprint("cpu")
    products = {}
    for problem in chain(group, "gram", "float32"):
        spec = kernel(f"{problem.op}.library")
        config = dict(vars(spec.untuned(problem, device)))
        best = CacheEntry(tuning_key(spec, problem, device), config, ok(1.0), "", {})
        products[problem] = TunedProduct(best, (best,))
    search = ChainSearch(estimates(group, ("gram",), "float32", products), products, kernels(), device)
    search.observe(first)
    assert search.candidate is not None
    return search


def ok(median_us: float) -> Measurement:
    return Measurement.from_samples([median_us], 0.0, {})


def test_chains_have_a_small_share_of_a_long_budget_and_less_than_half_of_a_short_one() -> None:
    assert chains_share_s(3600) == 540 and chains_share_s(60) == 20 and chains_share_s(10) == 4
    assert races_share_s(3600) == 360


def test_a_chain_that_fails_is_kept_and_another_form_runs(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmuon_tune.search.recipes.HOPELESS", 1e9)
    with Store.open(tuned.cache) as store:
        (ours,) = {trial.recipe.form for trial in store.chain_trials() if trial.recipe == _bare(store.recipes()[0])}
        with store._writing() as session:  # as if the winner's form had died in every chain
            session.execute(
                text("UPDATE dmuon_chains SET status = 'crashed', median_us = NULL, p20_us = NULL, p80_us = NULL, "
                     "samples = '[]' WHERE json_extract(recipe, '$.form') = :form"), {"form": ours},
            )
        other = tune(BATCH, store, ONLY_LIBRARY).recipes[0]
        assert other.timed and other.form != ours


def test_what_a_step_launches_at_a_chains_ends_is_tuned_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dmuon_tune.search.workload.WITH_ENDS", ("cpu",))  # whose library serves most of it, too
    with Store.open(tmp_path / "cache.sqlite") as store:
        report = tune(BATCH, store, ONLY_LIBRARY, events := Recorder())
        assert report.complete and report.measured == events.total == len(events.kept)
        found = {(each.problem.op, each.problem.epilogue): each.winner for each in report.problems}
        for end in (("momentum", "n"), ("apply", "w"), ("gemm_symmetric", "ci")):
            best = found[end]
            assert best is not None and best.measurement.ok and best.key.problem.batch == 3
        (recipe,) = report.recipes
        assert recipe.timed and first_launch(BATCH[0], "float32") in {pick.problem for pick in recipe.picks}
        assert all(first_launch(each.group, "float32") == each.picks[-1].problem for each in events.chains)
        quiet(store)
        again = tune(BATCH, store, ONLY_LIBRARY, second := Recorder())
        assert (again.measured, again.reused, second.tried) == (0, report.measured, []) and again.complete
        assert second.chains == [] and again.recipes == [recipe]
        store.put_recipe(report.device, replace(recipe, picks=recipe.picks[:-1]))  # as timed without its ends
        assert tune(BATCH, store, replace(ONLY_LIBRARY, budget_s=1e-6)).recipes == [recipe]


def _bare(recipe: Recipe) -> Recipe:
    return replace(recipe, cost_us=None, p20_us=None, p80_us=None, batch_costs=())


def test_spans_compete_where_a_kernel_of_ones_own_runs_them(
    monkeypatch: pytest.MonkeyPatch, misbehaving: None, tmp_path: Path
) -> None:
    monkeypatch.setenv(EXTRA_MODULES_VARIABLE, "whole_span")
    monkeypatch.setattr(recipes, "HOPELESS", float("inf"))  # however slow the sum of a form's products was
    kernel_specs._modules.cache_clear()
    group = Group(2, 8, 24)
    with Store.open(tmp_path / "cache.sqlite") as store:
        report = tune([group], store, replace(ONLY_LIBRARY, dtype="bfloat16"), events := Recorder())
        assert report.complete and report.chains.failed == 0, [t.measurement.log for t in store.chain_trials()]
        spans = [problem for problem in chain(group, "span", "bfloat16") if problem.op == "gram_span"]
        assert {problem.epilogue for problem in spans} == {"s2", "s3"}
        statuses = {each.problem: each.statuses for each in report.problems}
        assert [statuses[problem] for problem in spans] == [{"ok": 2}] * 2  # the library's beside one's own
        timed = [recipe for recipe in events.chains if recipe.form == "span" and recipe.group == group]
        assert timed and {pick.problem for pick in timed[0].picks} == chain(group, "span", "bfloat16").keys()
        assert report.recipes[0].timed


@pytest.mark.gpu
def test_on_a_gpu_the_small_form_competes(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with Store.open(tmp_path / "cache.sqlite") as store:
        options = TuneOptions(device="cuda", backends=("triton",), trials=1, workers=4)
        report = tune([Group(4, 64, 64)], store, options, events := Recorder())
        assert {"gram", "plain", "small"} >= {recipe.form for recipe in events.chains} >= {"small"}
        assert report.chains.failed == 0, [trial.measurement.log for trial in store.chain_trials()]
        (recipe,) = report.recipes
        assert recipe.timed and [batch for batch, _ in recipe.batch_costs] == [1, 2]
        at_ends = {
            (each.problem.op, each.problem.epilogue): each
            for each in report.problems
            if "bfloat16" in (each.problem.dtype, each.problem.out_dtype)
        }
        assert {("momentum", "n"), ("apply", "none"), ("polar_small", "s5r2")} <= at_ends.keys()
        assert all(each.statuses == {"ok": 1} for each in at_ends.values())
        assert all(first_launch(each.group, "float16") in {p.problem for p in each.picks} for each in events.chains)


TUNE_SLOWLY = """
import sys
from dmuon_tune.cache import Store
from dmuon_tune.recipe import Group
from dmuon_tune.search import TuneOptions, tune
with Store.open(sys.argv[1]) as store:
    tune([Group(1, 8, 24)], store, TuneOptions(device="cpu", backends=("library",)))
"""


def test_a_killed_run_is_continued_without_repeating(
    misbehaving: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(EXTRA_MODULES_VARIABLE, "bad_slow,bad_values")
    path = tmp_path / "cache.sqlite"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done: set[tuple[Problem, str, str]] = set()
    with closing(forked.Program(("-c", TUNE_SLOWLY, str(path)), environment, tmp_path)) as program:
        deadline = time.monotonic() + 60
        while len(done) < 3 and time.monotonic() < deadline and program.is_alive:
            time.sleep(0.3)
            if path.exists():
                with Store.open(path) as store:
                    done = finished_trials(store)
        program.kill()
    with Store.open(path) as store:
        done = finished_trials(store)
        assert len(done) >= 3
        report = tune(GROUPS, store, ONLY_LIBRARY, recorder := Recorder())
        assert report.complete and report.reused == len(done)
        assert report.measured == len(recorder.tried) > 0
        assert not done & set(recorder.tried)


def test_what_cannot_be_tuned_is_said() -> None:
    device = fingerprint("cpu")
    mixed = Problem("gram", 1, 8, 8, 8, "float16", "float32")
    with Store.open("sqlite://") as store:
        with pytest.raises(NoLegalConfigError, match="gram.library: the library writes its operands' dtype"):
            problem_search(mixed, [kernel("gram.library")], device, store, 5, 0)
        with pytest.raises(UsageError, match="unknown backend 'fortran'"):
            tune(GROUPS, store, TuneOptions(device="cpu", backends=("fortran",)))
    for wrong in ({"trials": 0}, {"budget_s": -1.0}, {"dtype": "float8"}, {"workers": 0}):
        with pytest.raises(UsageError):
            TuneOptions(**wrong)  # type: ignore[arg-type]


def test_backends_that_cannot_run_here_are_listed_with_their_reason() -> None:
    device = fingerprint("cpu")
    usable, unavailable = usable_kernels(device, None)
    assert unavailable == {
        name: reason for name, backend in backends().items() if (reason := backend.unavailable(device))
    }
    assert not {spec.backend for spec in usable} & unavailable.keys()
    assert {spec.backend for spec in usable_kernels(device, ())[0]} == {"library"}


def test_what_another_process_has_measured_meanwhile_is_reused(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"

    class Rival(Recorder):
        """After this run has planned, and before its first claim, another run over the same cache does everything."""

        def started(self, total: int, budget_s: float | None, races: int) -> None:
            super().started(total, budget_s, races)
            with Store.open(path) as other:
                self.rival = tune(GROUPS, other, ONLY_LIBRARY)

    with Store.open(path) as store:
        report = tune(GROUPS, store, ONLY_LIBRARY, recorder := Rival())
        assert report.complete and report.measured == len(recorder.tried) == recorder.total == 0
        assert report.reused == recorder.rival.measured > 0
        assert all(problem.winner for problem in report.problems) and report.recipes


def test_timings_on_a_busy_machine_are_counted_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contended = Measurement.from_samples([5.0], 0.0, {"contended": True})
    heard = _Worker._message

    def disturbed(worker: _Worker, kind: str, content: Any) -> Outcome | None:
        return None if heard(worker, kind, content) is None else contended

    monkeypatch.setattr(_Worker, "_message", disturbed)
    with Store.open(tmp_path / "cache.sqlite") as store:
        report = tune(GROUPS, store, ONLY_LIBRARY)
    total = report.measured + report.chains.timed
    assert report.contended == total > report.measured > 1
    assert [record.getMessage() for record in caplog.records if "disturbed" in record.getMessage()] == [
        f"{total} of {total} timings were disturbed by other processes and may be slow; "
        "tune on a quiet machine"
    ]


def test_a_broken_install_is_unavailable_and_nothing_of_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if backends()["tilelang"].unavailable(fingerprint("cpu")):
        pytest.skip("TileLang cannot run here")
    broken = tmp_path / "site" / "tilelang"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtvm.so: no such file')")
    monkeypatch.syspath_prepend(str(broken.parent))
    with Store.open(tmp_path / "cache.sqlite") as store:
        report = tune(GROUPS, store, TuneOptions(device="cpu", backends=("tilelang",), trials=1))
        assert "importing it fails: ImportError: libtvm.so: no such file" in report.unavailable["tilelang"]
        assert {trial.key.kernel.partition(".")[2] for trial in store.all_trials()} == {"library"}
        assert report.complete and len(report.recipes) == 1


HOMELESS = """
import os, pwd
def getpwuid(uid): raise KeyError(uid)
pwd.getpwuid = getpwuid  # a user that the system does not list
from dmuon_tune.backends import load
load("tilelang")
import tilelang
folder = os.path.dirname(tilelang.env.TILELANG_CACHE_DIR)
print(folder, oct(os.stat(folder).st_mode & 0o777), os.access(tilelang.env.TILELANG_CACHE_DIR, os.W_OK))
"""


@pytest.mark.parametrize("home", [None, "/nonexistent/home"])
def test_tilelang_loads_for_a_user_without_a_home(home: str | None, tmp_path: Path) -> None:
    if backends()["tilelang"].unavailable(fingerprint("cpu")):
        pytest.skip("TileLang cannot run here")
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "TILELANG_CACHE_DIR")}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    environment |= {} if home is None else {"HOME": home}
    done = subprocess.run([sys.executable, "-c", HOMELESS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / f"dmuon-tune-{os.getuid()}"), "0o700", "True"]


def test_trials_of_other_code_do_not_count(tmp_path: Path) -> None:
    device = fingerprint("cpu")
    spec = kernel("gram.library")
    problem = Problem("gram", 1, 8, 8, 8, "float32", "float32")
    with Store.open(tmp_path / "cache.sqlite") as store:
        current = problem_search(problem, [spec], device, store, 5, 0).kernels[0].key
        config = {"entry": "baddbmm"}
        store.record(replace(current, spec_digest="older"), config, Measurement.from_samples([1.0], 0.0, {}), {})
        fresh = problem_search(problem, [spec], device, store, 5, 0)
        assert fresh.reused == 0 and fresh.winner({}) is None
        store.record(current, config, Measurement.from_samples([2.0], 0.0, {}), {})
        resumed = problem_search(problem, [spec], device, store, 5, 0)
        assert resumed.reused == 1 and resumed.best_us == 2.0
        assert [config_json(candidate.config) for candidate in resumed.seeds()] == []


@pytest.mark.parametrize(
    ("library_us", "own_us", "is_rival"), [(10.0, 10.7, True), (10.0, 10.9, False), (10.0, 9.0, False)]
)
def test_an_own_kernel_that_the_library_beat_by_little_is_its_rival(
    library_us: float, own_us: float, is_rival: bool
) -> None:
    device, problem = fingerprint("cpu"), Problem("gram", 1, 64, 64, 64, "float32", "float32")
    own, library = kernel("gram.tilelang"), kernel("gram.library")
    config = dict(vars(own.untuned(problem, device)))
    with Store.open("sqlite://") as store:
        store.record(tuning_key(library, problem, device), {"entry": "baddbmm"}, ok(library_us), {})
        store.record(tuning_key(own, problem, device), config, ok(own_us), {})
        found = problem_search(problem, [own, library], device, store, 5, 0).own_rival({}, CLOSE_OWN)
    assert (found is not None and found.key.kernel == "gram.tilelang") == is_rival


def test_rivals_of_a_winner_are_those_close_to_the_fastest() -> None:
    device = fingerprint("cpu")
    problem = Problem("gram", 1, 64, 64, 64, "float32", "float32")
    spec = kernel("gram.tilelang")
    configs = [dict(vars(config)) for config in spec.legal_space(problem, device)]
    with Store.open("sqlite://") as store:
        for config, median_us in zip(configs, [10.0, 10.2, 10.9, 12.0], strict=False):
            store.record(tuning_key(spec, problem, device), config, ok(median_us), {})
        search = problem_search(problem, [spec], device, store, 5, 0)
    best = search.winner({})
    assert best is not None
    found = {close: search.rivals({}, close) for close in (1.03, 1.1)}
    assert len(found[1.03]) == 1 and len(found[1.1]) == min(2, len(configs) - 1)
    for rivals in found.values():
        assert best not in rivals and list(rivals) == sorted(rivals, key=lambda entry: entry.measurement.median_us or 0)

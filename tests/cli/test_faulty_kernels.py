"""A kernel whose answers raise, or are none, is named in a warning and left out: no search or training ends."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dmuon_tune import kernel_specs
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.errors import NoLegalConfigError, UsageError
from dmuon_tune.problem import Problem
from dmuon_tune.runtime import Muon
from dmuon_tune.search.kernel_search import kernel_searches

from .conftest import Run

pytestmark = pytest.mark.usefixtures("lasting_workers")

NAME = "gram.library.faulty"
GRAM = Problem("gram", 1, 8, 8, 24, "float32", "float32")
MODULE = """
import dataclasses
from dmuon_tune.kernel_specs.gram_library import KERNEL as own
from dmuon_tune.space import choice

@dataclasses.dataclass(frozen=True)
class Config:
    {entry}
{check}
def build(problem, config, device):
    return own.build(problem, own.Config(), device)

def fault(*asked):
    {body}

KERNEL = dataclasses.replace(own, Config=Config, build=build, sources=(__name__,), variant="faulty", {field}=fault)
"""
ENTRY = 'entry: str = choice("baddbmm", ("baddbmm", "other"))'
CHECK = """
    def __post_init__(self):
        if self.entry == "other": raise ValueError("not that")
"""
FAULTS = {  # fault → (field, body, what the warning says)
    "refusal raises": ("refusal", "raise ValueError('which one')", "refusal raised ValueError: which one at "),
    "refusal exits": ("refusal", "raise SystemExit(3)", "refusal raised SystemExit: 3 at "),
    "refusal is no text": ("refusal", "return False", "refusal returned False, not None or why not in words"),
    "refusal is empty": ("refusal", "return ''", "refusal returned '', not None or why not in words"),
    "illegality raises": ("illegality", "return 1 // 0", "illegality raised ZeroDivisionError: "),
    "illegality asks for nothing": ("illegality", "return asked[0].width > 3", "illegality raised AttributeError: "),
    "illegality is no text": ("illegality", "return [asked]", "illegality returned [(Problem("),
    "heuristic raises": ("heuristic", "raise KeyError('m')", "heuristic raised KeyError: 'm' at "),
    "heuristic is no configuration": ("heuristic", "return 'baddbmm'", "heuristic returned 'baddbmm', not a Config"),
    "seeds raise": ("seeds", "raise ValueError('none')", "seeds raised ValueError: none at "),
    "seeds are no configurations": ("seeds", "return [3]", "seeds returned (3,), not Configs"),
    "seeds are one": ("seeds", "return 3", "seeds raised TypeError: 'int' object is not iterable"),
    "Config raises": ("Config", "", "Config raised ValueError: not that at "),
}
LEFT_OUT = {"refusal", "illegality", "Config"}
Named = Callable[..., None]


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Named]:
    """Writes the faulty kernel's module and names it in the variable."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written: list[str] = []

    def name(field: str, body: str, entry: str = ENTRY) -> None:
        written.append(f"faulty_{len(sys.modules)}_{len(written)}")
        check = ""
        if field == "Config":
            field, body, check = "illegality", "return None", CHECK
        code = MODULE.format(field=field, body=body, entry=entry, check=check)
        (tmp_path / f"{written[-1]}.py").write_text(code)
        monkeypatch.setenv(kernel_specs.EXTRA_MODULES_VARIABLE, written[-1])
        kernel_specs._modules.cache_clear()

    yield name
    for each in written:
        sys.modules.pop(each, None)
    kernel_specs._modules.cache_clear()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_planned_and_explained_names_it_and_goes_on(run: Run, named: Named, fault: str) -> None:
    field, body, said = FAULTS[fault]
    shape = ("--shapes", "8x24", "--device", "cpu")
    warnings = []
    for command in (("tune", *shape, "--dry-run"), ("plan", *shape, "--world-size", "2"), ("explain", *shape)):
        named(field, body)  # anew: each process warns once
        result = run(*command)
        assert result.code == 0 and "Traceback" not in result.err, result.err
        warnings += [line for line in result.err.splitlines() if NAME in line]
    assert warnings or field == "seeds", "which a search asks alone"
    assert all(said in line and "of module faulty_" in line for line in warnings), warnings


@pytest.mark.parametrize("fault", ["refusal raises", "illegality raises", "heuristic raises", "seeds raise"])
def test_a_search_measures_all_others(run: Run, named: Named, own_cache: Path, fault: str) -> None:
    field, body, said = FAULTS[fault]
    named(field, body)
    result = run("tune", "--shapes", "8x24", "--device", "cpu", "--trials", "4", "--backends", "library")
    assert result.code == 0 and "gram.library" in result.out, result.err
    (warning,) = [line for line in result.err.splitlines() if NAME in line]
    assert said in warning
    with Store.open(own_cache) as store:
        kernels = {trial.key.kernel for trial in store.all_trials()}
    assert "gram.library" in kernels and (NAME in kernels) == (field not in LEFT_OUT)


@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on(named: Named, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    field, body, said = FAULTS[fault]
    named(field, body)
    weight = torch.nn.Parameter(torch.randn(8, 24))
    weight.grad, before = torch.randn(8, 24), weight.detach().clone()
    with caplog.at_level(logging.WARNING):
        Muon([weight], lr=0.1).step()
    assert not torch.equal(weight, before)
    assert all(said in text for text in caplog.messages if NAME in text)


@pytest.mark.parametrize("field", sorted(LEFT_OUT - {"Config"}))
def test_where_nothing_else_is_there_the_error_says_what_it_did(named: Named, tmp_path: Path, field: str) -> None:
    named(field, "raise ValueError('which one')")
    device, spec = fingerprint("cpu"), kernel_specs.kernel(NAME)
    with Store.open(tmp_path / "cache.sqlite") as store, pytest.raises(NoLegalConfigError) as caught:
        kernel_searches(GRAM, [spec], device, store, 0)
    assert f"{NAME}: {field} raised ValueError: which one at " in str(caught.value) and caught.value.exit_code == 5


@pytest.mark.parametrize("entry", ["entry: list = dataclasses.field(default_factory=list)", "entry: int"])
def test_a_config_without_usable_defaults_is_refused_where_it_is_named(named: Named, entry: str) -> None:
    named("refusal", "return None", entry)
    with pytest.raises(UsageError, match="KERNEL: Config must be frozen, with a default of JSON's types for each"):
        kernel_specs.kernels()


@pytest.mark.parametrize("backends", [(), ("--backends", "mine"), ("--backends", "library")])
@pytest.mark.parametrize("code", ["import nothere", "raise ValueError('no GPU')", "x = 1"])
def test_a_module_of_no_use_is_said_whatever_backends_are_asked_for(
    run: Run, named: Named, tmp_path: Path, code: str, backends: tuple[str, ...]
) -> None:
    named("refusal", "return None")
    (module,) = tmp_path.glob("faulty_*.py")
    module.write_text(code)
    result = run("tune", "--shapes", "8x24", "--device", "cpu", *backends, "--dry-run")
    assert (result.code, result.out) == (2, "") and result.err.count("\n") == 1
    assert f"DMUON_TUNE_KERNEL_MODULES: module {module.stem!r} " in result.err


def test_a_kernel_in_an_unknown_language_is_left_out_aloud(run: Run, named: Named, tmp_path: Path) -> None:
    named("refusal", "return None")
    (module,) = tmp_path.glob("faulty_*.py")
    module.write_text(module.read_text().replace('variant="faulty"', 'variant="faulty", backend="mine"'))
    how = ("tune", "--shapes", "8x24", "--device", "cpu", "--dry-run")
    result = run(*how)
    assert result.code == 0 and result.err.count("gram.mine.faulty is left out: dmuon_tune/backends has no file") == 1
    result = run(*how, "--backends", "mine")
    assert (result.code, result.out) == (2, "")
    assert "unknown backend 'mine', of which kernel gram.mine.faulty is, has no file in dmuon_tune/b" in result.err

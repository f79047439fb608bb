"""A tuned CPU kernel runs from its artefact without its DSL or a compiler, and a damaged one is said and mended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.backends.shared_library import FORMAT, cpu_features
from dmuon_tune.cache import Artefact, ArtefactStore, Store
from dmuon_tune.cli import main
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import compile_portable, tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.portable import UnloadableCodeError
from dmuon_tune.recipe import Group, Pick, Recipe, chain
from dmuon_tune.runtime import GramNewtonSchulz, plan
from dmuon_tune.space import config_to_dict

ROOT = Path(__file__).resolve().parents[2]
GROUP = Group(2, 16, 24)
JOBS = {"cpu": "1", "cuda": "8"}
pytestmark = pytest.mark.skipif(
    backends()["tilelang"].unavailable(fingerprint("cpu")) is not None, reason="TileLang's CPU target cannot run here"
)
# What stands for a machine with the runtime alone: the languages are not importable, and PATH has no compiler.
BARE = """
import json, logging, sys
for name in ("tilelang", "tvm", "tvm_ffi", "cutlass", "triton"):
    sys.modules[name] = None
import torch
from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.recipe import Group
from dmuon_tune.runtime import GramNewtonSchulz, Muon, plan
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.connect")
torch.set_num_threads(1)
device = sys.argv[4]
assert all(backends()[name].unavailable(fingerprint(device)) for name in ("tilelang", "cutedsl", "triton"))
warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("dmuon_tune").addHandler(handler)
group = Group(*json.loads(sys.argv[1]))
resolved = plan([group], device)
bound = resolved.groups[group].bindings.values()
x = torch.load(sys.argv[2]).to(device)
torch.save(GramNewtonSchulz(plan=resolved)(x).cpu(), sys.argv[3])
weights = [torch.nn.Parameter(matrix.clone()) for matrix in x]
for weight in weights:
    weight.grad = weight.detach().clone()
bias = torch.nn.Parameter(torch.ones(4, device=device))
bias.grad = torch.ones(4, device=device)
optimizer = Muon([{"params": weights}, {"params": [bias], "use_muon": False}])
before, started = set(sys.modules), []
sys.addaudithook(lambda event, _: started.append(event) if event in STARTS else None)
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
print(json.dumps({
    "started": started, "compiler": "torch._dynamo" in sys.modules,
    "imported": [name for name in set(sys.modules) - before if not name.startswith("torch.")],
    "origins": [each.origin for each in bound], "loaded": [each.from_artefact for each in bound],
    "kernels": [each.kernel for each in bound], "warnings": warnings,
}))
"""


def ship(path: Path, device: DeviceFingerprint, dtype: str, backend: str) -> None:
    """A cache whose every product is of one DSL, and its artefacts."""
    picks = []
    with Store.open(path) as store:
        for problem in chain(GROUP, "gram", dtype):
            spec = kernel(f"{problem.op}.{backend}")
            config, key = config_to_dict(spec.untuned(problem, device)), tuning_key(spec, problem, device)
            store.record(key, config, Measurement.from_samples([10.0], 1e-6, {}), {"validation": "test"})
            picks.append(Pick(problem, spec.name, config, key.sha256))
        store.put_recipe(device, Recipe(GROUP, "gram", dtype, picks=tuple(picks)))
    assert main(["cache", "build", "--cache", str(path), "--arch", device.arch, "--jobs", JOBS[device.kind]]) == 0


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned") / "cache.sqlite"
    ship(path, fingerprint("cpu"), "float32", "tilelang")
    return path


@pytest.fixture
def cache(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, and the only cache here."""
    folder = tmp_path / "opt"
    shutil.copytree(tuned.parent, folder)
    monkeypatch.setenv("DMUON_TUNE_CACHE_PATH", str(folder))
    yield folder / "cache.sqlite"


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(GROUP.batch, GROUP.rows, GROUP.cols, generator=torch.Generator().manual_seed(0))


def bare(cache: Path, x: torch.Tensor, device: str = "cpu") -> tuple[dict[str, Any], torch.Tensor]:
    """(what ran, the polar factors) of a fresh process that has the runtime alone."""
    given, result = cache.parent / "x.pt", cache.parent / "polar.pt"
    torch.save(x, given)
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps([GROUP.batch, GROUP.rows, GROUP.cols]), given, result, device],
        env={
            "DMUON_TUNE_CACHE_PATH": str(cache), "PYTHONPATH": search_path, "PATH": "", "HOME": "/nonexistent",
            "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        },
        capture_output=True, text=True, timeout=240, cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), torch.load(result)


def test_without_language_and_compiler_the_tuned_kernels_run_bit_for_bit(cache: Path, x: torch.Tensor) -> None:
    ran, polar = bare(cache, x)
    assert set(ran["origins"]) == {"tuned"} and all(ran["loaded"]) and not ran["warnings"]
    assert ran["kernels"] == ["gram.tilelang", "gemm_symmetric.tilelang", "apply.tilelang"]
    assert ran["started"] == ran["imported"] == []  # by an optimizer's first step
    assert not ran["compiler"]  # PyTorch's, whose import takes seconds
    shutil.rmtree(cache.parent / "artefacts")
    compiled = plan([GROUP], "cpu")
    bound = compiled.groups[GROUP].bindings.values()
    assert {each.origin for each in bound} == {"tuned"} and not any(each.from_artefact for each in bound)
    assert torch.equal(polar, GramNewtonSchulz(plan=compiled)(x))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cutedsl", "tilelang", "triton"])
def test_on_a_gpu_without_any_dsl_the_tuned_kernels_run_bit_for_bit(
    backend: str, tmp_path: Path, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, path = fingerprint("cuda"), tmp_path / "opt" / "cache.sqlite"
    if reason := backends()[backend].unavailable(device):
        pytest.skip(reason)
    monkeypatch.setenv("DMUON_TUNE_CACHE_PATH", str(path))
    ship(path, device, "float16", backend)
    x = x.bfloat16()  # the ends that `cache build` compiles
    ran, polar = bare(path, x, "cuda")
    assert set(ran["origins"]) == {"tuned"} and all(ran["loaded"]) and not ran["warnings"]
    assert ran["kernels"] == [f"{op}.{backend}" for op in ("gram", "gemm_symmetric", "apply")]
    shutil.rmtree(path.parent / "artefacts")
    compiled = plan([GROUP], "cuda")
    assert not any(each.from_artefact for each in compiled.groups[GROUP].bindings.values())
    assert torch.equal(polar, GramNewtonSchulz(plan=compiled)(x.cuda()).cpu())


def test_building_again_keeps_what_is_whole(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "build", "--cache", str(cache), "--format", "json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in built["artefacts"]] == ["kept"] * 3
    assert built["folder"] == str(cache.parent / "artefacts")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("dmuon_tune")]


def damage(cache: Path) -> Artefact:
    store = ArtefactStore.beside(cache)
    broken = next(artefact for artefact in store.all() if artefact.key.kernel == "gram.tilelang")
    code = store.files(broken)[0]
    damaged = code.read_bytes()[:-1] + b"x"
    code.unlink()  # this process may have the file mapped, and would die of another content at its exit
    code.write_bytes(damaged)
    return broken


def test_a_damaged_artefact_is_said_once_compiled_and_mended_by_the_command(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, command = damage(cache), f"dmuon-tune cache build --cache {cache}"
    for _ in range(2):
        bound = list(plan([GROUP], "cpu").groups[GROUP].bindings.values())
        assert {each.origin for each in bound} == {"tuned"}
        assert [each.kernel for each in bound if not each.from_artefact] == ["gram.tilelang"]
    (warning,) = said(caplog)
    assert broken.label() in warning and "it is compiled now" in warning and warning.endswith(command)
    assert main(command.split()[1:]) == 0
    assert ArtefactStore.beside(cache).verify() == []
    assert all(each.from_artefact for each in plan([GROUP], "cpu").groups[GROUP].bindings.values())


def test_a_damaged_artefact_that_cannot_be_compiled_leaves_its_product_to_another_kernel(
    cache: Path, caplog: pytest.LogCaptureFixture, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = GramNewtonSchulz(plan=plan([GROUP], "cpu"))(x)
    broken = damage(cache)
    monkeypatch.setattr(type(backends()["tilelang"]), "unavailable", lambda self, device: "not installed")
    resolved = plan([GROUP], "cpu")
    kernels = [each.kernel for each in resolved.groups[GROUP].bindings.values()]
    assert kernels == ["gram.library", "gemm_symmetric.tilelang", "apply.tilelang"]
    (warning,) = said(caplog)
    assert broken.label() in warning and "another kernel runs instead" in warning
    assert torch.allclose(exact, GramNewtonSchulz(plan=resolved)(x), atol=1e-5)


@pytest.mark.parametrize("variable", ["DMUON_TUNE_CACHE_DIR", "DMUON_TUNE_CACHE_PATH"])
def test_other_code_for_what_is_known_to_be_right_is_checked_before_it_runs(
    cache: Path, variable: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the result was measured here, was checked when it was compiled here, or its former code passed."""
    monkeypatch.delenv("DMUON_TUNE_CACHE_PATH")
    monkeypatch.setenv(variable, str(cache.parent))
    device, store = fingerprint("cpu"), ArtefactStore.beside(cache)
    shutil.move(store.folder, cache.parent / "away")
    assert not any(each.from_artefact for each in plan([GROUP], "cpu").groups[GROUP].bindings.values())
    shutil.move(cache.parent / "away", store.folder)
    assert all(each.from_artefact for each in plan([GROUP], "cpu").groups[GROUP].bindings.values())
    artefact = next(artefact for artefact in store.all() if artefact.key.kernel == "gram.tilelang")
    spec, shorter = kernel("gram.tilelang"), replace(artefact.key.problem, k=GROUP.cols // 2)
    store.add(artefact.key, artefact.config, compile_portable(spec, shorter, spec.untuned(shorter, device), device))
    assert store.verify() == [] and not said(caplog)
    bound = plan([GROUP], "cpu").groups[GROUP].bindings.values()
    assert [each.kernel for each in bound] == ["gram.library", "gemm_symmetric.tilelang", "apply.tilelang"]
    (warning,) = said(caplog)
    assert "gram.tilelang" in warning and "failed its check" in warning and "the library runs instead" in warning


def test_a_record_of_other_source_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of an older version of the kernel would be another kernel's."""
    monkeypatch.setattr("dmuon_tune.runtime.resolve.KernelSpec.digest", lambda spec: "ab" * 32)
    resolved = plan([GROUP], "cpu")
    assert not any(each.from_artefact for each in resolved.groups[GROUP].bindings.values())
    assert len(resolved.missing) == 3


def test_an_artefact_outlives_its_toolchain(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(backends()["tilelang"]), "unavailable", lambda self, device: "not installed")
    monkeypatch.setattr(type(backends()["tilelang"]), "toolchain", not_installed)
    resolved = plan([GROUP], "cpu")
    assert all(each.from_artefact for each in resolved.groups[GROUP].bindings.values()) and not resolved.failures
    assert main(["explain", "--shapes", GROUP.label(), "--device", "cpu", "--format", "json"]) == 0
    verdicts = {row["kernel"]: row["verdict"] for row in json.loads(capsys.readouterr().out)["candidates"]}
    assert {verdicts[f"{op}.tilelang"] for op in ("gram", "gemm_symmetric", "apply")} == {"chosen"}


def not_installed(backend: Any, device: DeviceFingerprint) -> Any:
    raise ModuleNotFoundError("TileLang is not installed")


def test_code_for_a_cpu_with_more_is_refused(tmp_path: Path) -> None:
    launch = {"symbol": "call", "arguments": [], "machine": "x86_64", "features": [*cpu_features(), "amx_dreams"]}
    with pytest.raises(UnloadableCodeError, match="x86_64|amx_dreams"):
        FORMAT.load(b"", launch, tmp_path / "none")

"""The span form end to end: the Gram form's bits on a CPU, its choice and counters, on a GPU every way to launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmuon_tune import chains
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Layers, Store
from dmuon_tune.coefficients import coefficient_set
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import gram_span_library, kernels
from dmuon_tune.measure import untuned
from dmuon_tune.recipe import Group, Recipe, spans
from dmuon_tune.runtime import GramNewtonSchulz, Muon, execution, plan, resolve
from dmuon_tune.runtime.plan import Plan, _bind, _recipe
from dmuon_tune.runtime.resolve import Resolver
from dmuon_tune.runtime.static import Workspace
from dmuon_tune.spec import KernelSpec

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
gpu = pytest.mark.gpu


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def choose(cache_file: Path, recipe: Recipe, device: str = "cpu") -> None:
    """Keep this recipe in the user's cache, by hand: it has no cost."""
    with Store.open(cache_file) as store:
        store.put_recipe(fingerprint(device), recipe)


def given(*recipes: Recipe) -> Plan:
    """A plan of these recipes on the CPU, as if a cache held them."""
    resolver = Resolver(fingerprint("cpu"), Layers({}), use_nearest=False)
    return Plan("cpu", resolver.device, {recipe.group: _bind(resolver, "user", recipe) for recipe in recipes})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("steps", "restarts"), [(5, (2,)), (5, ()), (5, (1, 3)), (1, ()), (3, (1, 2))])
@pytest.mark.parametrize("shape", [(3, 17, 33), (5, 33, 17), (1, 24, 24), (2, 1, 1)])
def test_spans_by_the_library_are_the_gram_form_to_the_bit(
    shape: tuple[int, int, int], steps: int, restarts: tuple[int, ...], dtype: str
) -> None:
    """Its span is the same products in the same order, and their factors differ by powers of two from fp32's own."""
    x, results = gaussian(*shape), []
    for form in ("gram", "span"):
        resolved = given(Recipe(Group(*shape), form, dtype, steps, restarts, chunk=2))
        run = GramNewtonSchulz("jordan", steps=steps, restarts=restarts, dtype=dtype, plan=resolved)
        results += [run(x), run(x)]
        assert {row["form"] for row in resolved.rows()} == {form}
    assert all(torch.equal(results[0], result) for result in results)
    assert bool(results[0].isfinite().all()) and float(results[0].abs().max()) > 0.1


def test_a_step_of_muon_in_spans_equals_one_by_products(cache_file: Path) -> None:
    moved = []
    for form in ("gram", "span"):
        choose(cache_file, Recipe(Group(2, 12, 30), form, "float32"))
        weights = [nn.Parameter(gaussian(12, 30, seed=i)) for i in range(2)]
        optimizer = Muon(weights, lr=0.1)
        for step in range(3):
            for i, weight in enumerate(weights):
                weight.grad = gaussian(12, 30, seed=10 * step + i)
            optimizer.step()
        moved.append([weight.detach() for weight in weights])
    assert all(map(torch.equal, *moved))


def test_groups_share_scratch_and_counters_that_are_zeroed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that counts at its barriers: more matrices than before get new ones, which are zero too."""
    seen: list[tuple[int, int]] = []

    def build(problem: Any, config: Any, device: Any) -> Any:
        launch = gram_span_library.build(problem, config, device)

        def counting(r: Tensor, coefficients: Tensor, q: Tensor, work: Tensor, barriers: Tensor) -> None:
            assert not barriers.any() and len(barriers) == 32 * len(r) and work.shape == (5, *r.shape)
            assert coefficients.shape == (int(problem.epilogue[1:]), 3)
            seen.append((work.data_ptr(), barriers.data_ptr()))
            barriers.add_(1)
            launch(r, coefficients, q, work.fill_(float("nan")), barriers)
            barriers.sub_(1)

        return counting

    spec = replace(gram_span_library.KERNEL, build=build)
    monkeypatch.setattr(resolve, "kernels", lambda op: [spec] if op == "gram_span" else kernels(op))
    groups = [Group(4, 12, 20), Group(2, 16, 8), Group(6, 12, 20)]  # the second needs no more than the first
    run = GramNewtonSchulz(plan=given(*(Recipe(group, "span", "float32", chunk=4) for group in groups)))
    for group in groups * 2:
        x = gaussian(group.batch, group.rows, group.cols)
        assert torch.equal(run(x), run(x)) and bool(run(x).isfinite().all())
    assert len({barriers for _, barriers in seen}) == 1 and len({work for work, _ in seen}) == 1


def test_counters_are_zeroed_when_they_are_made_alone() -> None:
    workspace = Workspace(torch.device("cpu"))
    counters = workspace.buffer("barriers", (32,), torch.int32, zeros=True)
    assert not counters.any()
    counters.fill_(3)
    assert bool((workspace.buffer("barriers", (32,), torch.int32, zeros=True) == 3).all())
    assert not workspace.buffer("barriers", (64,), torch.int32, zeros=True).any()


def test_a_callers_capture_has_counters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = GramNewtonSchulz(plan=given(Recipe(Group(3, 8, 20), "span", "float32"))), gaussian(3, 8, 20)
    want = run(x)
    (workspace,) = run._workspaces.values()
    workspace._buffers[torch.int32, "barriers"].fill_(1)
    made: list[Workspace] = []
    monkeypatch.setattr(execution, "capturing", lambda device: True)
    monkeypatch.setattr(execution, "Workspace", lambda device: made.append(Workspace(device)) or made[-1])
    assert torch.equal(run(x), want)
    (own,) = made
    assert not own._buffers[torch.int32, "barriers"].any()
    assert {"work", "s0", "s1"} <= {name for _, name in own._buffers}


def test_each_span_reads_its_own_coefficients_and_the_first_takes_the_scale_out() -> None:
    triples = coefficient_set("you").take(5)
    first, second, third = chains.tables("span", triples, (1, 3), 256)
    assert second == triples[1:3] and third == triples[3:]
    ((a, b, c),) = first
    assert (a, b, c) == (triples[0][0], triples[0][1] / 2**8, triples[0][2] / 2**16)
    assert spans(5, (1, 3)) == (1, 2, 2) and chains.tables("gram", triples, (2,), 256) == []


def test_a_span_recipe_of_the_tuner_without_its_kernel_runs_by_products(cache_file: Path) -> None:
    group = Group(1, 16, 64)
    for cost_us, form in ((None, "span"), (5.0, "gram")):
        choose(cache_file, Recipe(group, "span", "float16", cost_us=cost_us))
        planned = plan([group], "cpu", "float16").groups[group]
        assert (planned.recipe.form, planned.recipe.cost_us) == (form, None)
    assert plan([group], "cpu", "float16", steps=4).groups[group].recipe.form == "gram"  # it is of five steps


def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span kernel for this GPU whose code compiles nothing here."""
    own = KernelSpec(
        "gram_span", "cutedsl", gram_span_library.SpanConfig, gram_span_library.refusal, gram_span_library.build,
        gram_span_library.KERNEL.sources,
    )
    both = [own, gram_span_library.KERNEL]
    monkeypatch.setattr(resolve, "kernels", lambda op: both if op == "gram_span" else kernels(op))


@pytest.mark.parametrize(
    ("shape", "form"),
    [((1024, 4096), "span"), ((4096, 512), "span"), ((1024, 1024), "plain"), ((2048, 8192), "gram"),
     ((64, 128), "small")],
)
def test_without_a_recipe_the_gram_form_runs_by_spans_up_to_an_order_where_a_kernel_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], form: str
) -> None:
    pytest.importorskip("cutlass")
    layers = Layers.open({"HOME": str(tmp_path)})
    found = [_recipe(Resolver(H200, layers, False), Group(2, *shape), "float16", 5, (2,))[1].form]
    served(monkeypatch)
    resolver = Resolver(H200, layers, False)
    found.append(_recipe(resolver, Group(2, *shape), "float16", 5, (2,))[1].form)
    assert found[-1] == form and resolver.missing == []


def test_a_default_span_that_does_not_compile_runs_by_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    served(monkeypatch)

    def build(spec: KernelSpec, *rest: Any) -> Any:
        if spec.name == "gram_span.cutedsl":
            raise RuntimeError("ptxas: error")
        return kernels_compiled

    kernels_compiled = type("Compiled", (), {"launch": staticmethod(lambda *arguments: None)})
    resolver = Resolver(H200, Layers.open({"HOME": str(tmp_path)}), False, build)
    planned = _bind(resolver, *_recipe(resolver, Group(2, 1024, 4096), "float16", 5, (2,)))
    assert planned.recipe.form == "gram" and "ptxas: error" in resolver.failures[0]


@pytest.fixture
def spans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled are the spans, where a kernel has them: the other products are the library's."""
    monkeypatch.setattr(untuned, "SYMMETRIC_FROM_M", {})
    monkeypatch.setattr(untuned, "FUSED", {"momentum": ("triton",), "gram_span": ("cutedsl",)})
    monkeypatch.setattr(untuned, "UPDATE", ())


@gpu
@pytest.mark.usefixtures("spans_alone")
@pytest.mark.parametrize(
    ("shape", "dtype", "restarts"),
    [
        ((3, 384, 1000), "float16", (2,)), ((1, 1024, 2048), "float16", (2,)), ((4, 200, 77), "float16", (2,)),
        ((5, 256, 1024), "float16", (2,)), ((2, 512, 512), "float16", ()), ((2, 512, 512), "float16", (1, 3)),
        ((3, 384, 1000), "bfloat16", (2,)),
    ],
)
def test_chains_in_spans_on_a_gpu_are_as_close_as_by_products_and_the_same_every_time(
    cache_file: Path, shape: tuple[int, int, int], dtype: str, restarts: tuple[int, ...]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = gaussian(*shape).to("cuda", torch.bfloat16)
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    errors = []
    for form in ("gram", "span"):
        chunk = 2 if shape[0] == 5 else None
        choose(cache_file, Recipe(Group(*shape), form, dtype, 5, restarts, chunk=chunk), "cuda")
        fixed: dict[str, Any] = {
            "coefficients": "jordan", "restarts": restarts, "dtype": dtype,
            "plan": plan([Group(*shape)], "cuda", dtype, restarts=restarts),
        }
        run, eager, graph = GramNewtonSchulz(**fixed), GramNewtonSchulz(**fixed, graphs=False), torch.cuda.CUDAGraph()
        want = eager(x)
        errors.append(float(torch.linalg.norm(want - u @ vh) / torch.linalg.norm(u @ vh)))
        with torch.cuda.graph(graph):
            captured = eager(x)
        for _ in range(20):
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, want) and torch.equal(run(x), want)
        (planned,) = run._planned.values()
        assert planned.recipe.form == form and run._workspaces.keys() == {x.device}
    assert errors[1] <= 1.1 * errors[0] + 0.005, errors


@gpu
def test_an_optimizer_step_in_spans_on_a_gpu(cache_file: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    moved: dict[tuple[str, bool], list[Tensor]] = {}
    for form in ("gram", "span"):
        choose(cache_file, Recipe(Group(3, 384, 1024), form, "float16"), "cuda")
        for graphs in (True, False):
            weights = [nn.Parameter(gaussian(384, 1024, seed=i).to("cuda", torch.bfloat16)) for i in range(3)]
            optimizer = Muon(weights, lr=0.1, weight_decay=0.1, graphs=graphs)
            for step in range(4):
                for i, weight in enumerate(weights):
                    weight.grad = gaussian(384, 1024, seed=10 * step + i).to("cuda", torch.bfloat16)
                optimizer.step()
            moved[form, graphs] = [weight.detach() for weight in weights]
    for form in ("gram", "span"):
        assert all(map(torch.equal, moved[form, True], moved[form, False])), form
    for one, other in zip(moved["gram", True], moved["span", True], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=5e-3)

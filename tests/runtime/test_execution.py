"""What runs around a chain's products: static tensors, work buffers, ends by address, and CUDA graphs on a GPU."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmuon_tune import chains
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.coefficients import coefficient_set
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure import untuned
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe
from dmuon_tune.runtime import GramNewtonSchulz, Muon, execution, newton_schulz, resolve
from dmuon_tune.runtime.ends import Ends, _with_identity, resolve_ends
from dmuon_tune.runtime.execution import GroupChain, Momentum
from dmuon_tune.runtime.phases import watched
from dmuon_tune.runtime.plan import GroupPlan
from dmuon_tune.runtime.resolve import Binding
from dmuon_tune.runtime.static import Constant, Static, Workspace

CPU = torch.device("cpu")
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_static_tensor_is_rewritten_only_where_values_changed() -> None:
    static = Static(CPU, torch.int64)
    first = static.holding(range(2**45, 2**45 + 48, 16))
    written = first._version
    assert first.tolist() == [2**45, 2**45 + 16, 2**45 + 32]
    assert static.holding(range(2**45, 2**45 + 48, 16)) is first and first._version == written
    assert static.holding((7, 5, 3)) is first and first.tolist() == [7, 5, 3]
    assert static.holding((1, 2)).tolist() == [1, 2]


def test_a_static_table_has_columns() -> None:
    assert Static(CPU, torch.float32, columns=2).holding((0.5, 0.25, 1.0, 2.0)).tolist() == [[0.5, 0.25], [1.0, 2.0]]


def test_a_buffer_that_moves_changes_the_version() -> None:
    workspace = Workspace(CPU)
    big = workspace.buffer("x", (4, 5), torch.float32)
    version = workspace.version
    small = workspace.buffer("x", (2, 3), torch.float32)
    assert small.data_ptr() == big.data_ptr() and workspace.version == version
    assert workspace.buffer("x", (4, 6), torch.float32).shape == (4, 6) and workspace.version == version + 1


def at(address: int, shape: tuple[int, ...]) -> Tensor:
    count = shape[0] * shape[1]
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32).view(shape)


def update_by_address(q: Tensor, x: Tensor, w: Tensor, rates: Tensor, alpha: float) -> None:
    """``apply`` with epilogue w on a CPU, for wide matrices."""
    for index, (address, (decay, rate)) in enumerate(zip(w.tolist(), rates.tolist(), strict=True)):
        weight = at(address, x[index].shape)
        weight.mul_(decay).sub_(rate * alpha * (q[index] @ x[index]))


def test_weights_by_the_last_product_equal_weights_by_torch() -> None:
    weights, gradients, momenta = ([gaussian(8, 24, seed=10 * s + i) for i in range(3)] for s in range(3))
    rates = [(0.9, 0.1), (0.9, 0.1), (1.0, 0.3)]
    run = GramNewtonSchulz(dtype="float32")
    chain, ends = run._bound(Group(3, 8, 24), CPU, torch.float32, "n", torch.float32, True)
    fused = dataclasses.replace(ends, weights={3: update_by_address})
    results = []
    for used in (ends, fused):
        copies = [tensor.clone() for tensor in weights]
        momentum = Momentum("n", tuple(tensor.clone() for tensor in momenta), 0.9)
        chain.step(tuple(gradients), momentum, used, copies, rates)
        results.append(copies)
        assert torch.equal(momentum.buffers[0], momenta[0] * 0.9 + gradients[0])
    for one, other, before in zip(*results, weights, strict=True):
        assert not torch.equal(one, before)
        torch.testing.assert_close(one, other)


@pytest.fixture
def updates_by_the_library(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """On a CPU the last product by address, as on a GPU; the epilogues that ran there."""
    ran: list[str] = []

    def noted(binding: Binding) -> Any:
        def launch(*arguments: Any) -> None:
            ran.append(binding.problem.epilogue)
            binding.launch(*arguments)

        return launch

    def resolved(planned: GroupPlan, resolver: resolve.Resolver, *wanted: Any) -> Ends:
        found = resolve_ends(planned, resolver, *wanted)
        weights, with_identity = {}, {}
        for size, like in planned.endings.items():
            update = resolver.bind_end(dataclasses.replace(like.problem, out_dtype="float32", epilogue="w"), like)
            shifted = _with_identity(planned.bound(size, "gemm_symmetric", "c"), resolver)
            if planned.recipe.form == "plain" and update and shifted:
                weights[size], with_identity[size] = noted(update), noted(shifted)
        return dataclasses.replace(found, weights=weights, with_identity=with_identity)

    monkeypatch.setattr(newton_schulz, "resolve_ends", resolved)
    return ran


def updated(shapes: list[tuple[int, int]], dtype: str) -> list[Tensor]:
    """The polar factors that one step of Muon moved the weights by."""
    weights = [nn.Parameter(gaussian(*shape, seed=i)) for i, shape in enumerate(shapes)]
    before = [weight.detach().clone() for weight in weights]
    for i, weight in enumerate(weights):
        weight.grad = gaussian(*weight.shape, seed=10 + i)
    Muon(weights, lr=0.5, weight_decay=0.2, scale="none", ns_dtype=dtype).step()
    return [(0.9 * old - new.detach()) / 0.5 for old, new in zip(before, weights, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_by_the_plain_forms_last_product_are_as_close_to_the_polar_factor(
    dtype: str, request: pytest.FixtureRequest
) -> None:
    shapes = [(48, 48), (40, 56), (56, 40), (40, 56)]
    plain = updated(shapes, dtype)
    ran: list[str] = request.getfixturevalue("updates_by_the_library")
    fused = updated(shapes, dtype)
    # The library rounds Z before it adds aI: in bf16 the βX term stays. Two of the matrices run together.
    assert sorted(ran) == ([] if dtype == "bfloat16" else ["ci"] * 3 + ["w"] * 3)
    for i, (one, other) in enumerate(zip(plain, fused, strict=True)):
        left, _, right = torch.linalg.svd(gaussian(*shapes[i], seed=10 + i).double(), full_matrices=False)
        errors = [float(torch.linalg.norm(found - left @ right)) for found in (one, other)]
        assert errors[1] <= 1.1 * errors[0] < 0.5 * 40**0.5, (dtype, shapes[i], errors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_identity_in_the_last_product_costs_no_accuracy_when_rounded_once(dtype: torch.dtype) -> None:
    def rounded(result: Tensor, out: Tensor) -> None:
        out.copy_(result)

    def product(a: Tensor, b: Tensor, c: Tensor, d: Tensor, alpha: float, beta: float, gamma: float = 0.0) -> None:
        rounded(alpha * a.float() @ b.float() + beta * c.float() + gamma * torch.eye(a.shape[-1]), d)

    launches: dict[tuple[str, str], Any] = {
        ("gram", "none"): lambda x, r, alpha: rounded(alpha * x.float() @ x.float().mT, r),
        ("gemm_symmetric", "c"): product,
        ("apply", "c"): lambda q, x, y, alpha, beta: rounded(alpha * q.float() @ x.float() + beta * x.float(), y),
    }
    triples = coefficient_set("you").take(5)  # whose polar error is the smallest
    u = gaussian(1, 96, 128)
    left, _, right = torch.linalg.svd(u.double(), full_matrices=False)
    errors = []
    for with_identity in (None, product):
        x = (u * (chains.input_scale(96) / u.norm())).to(dtype)
        squares = [torch.empty(1, 96, 96, dtype=dtype) for _ in range(2)]
        last = chains.all_but_last("plain", launches, x, torch.empty_like(x), squares, triples, (), (), with_identity)
        polar = last.scalars[0] * last.q.float() @ last.x.float()  # the update's fp32 accumulators
        if with_identity is None:
            polar += last.scalars[1] * last.x.float()
        errors.append(float(torch.linalg.norm(polar - left @ right) / 96**0.5))
    assert errors[1] <= 1.1 * errors[0] < 0.1, errors


def test_a_result_at_an_odd_address_is_written_through_an_aligned_buffer() -> None:
    x = gaussian(2, 5, 9)
    run = GramNewtonSchulz(dtype="float32")
    chain, ends = run._bound(Group(2, 5, 9), CPU, torch.float32, "none", torch.float32, False)
    odd = torch.empty(2 * 5 * 9 + 1)[1:].view(2, 5, 9)
    asked: list[int] = []

    def noted(q: Tensor, given: Tensor, y: Tensor, *scalars: float) -> None:
        asked.append(y.data_ptr() % 16)
        ends.last[2](q, given, y, *scalars)

    chain.polar(x, dataclasses.replace(ends, last={2: noted}), odd)
    assert asked == [0] and torch.equal(odd, run(x))


class Recorded:
    """Stands in for a CUDA graph: runs the launches at their capture, for the first replay, and again at each other."""

    def __init__(self, launched: Any) -> None:
        self.replay, self.replays = self._run, 0
        self._launched = launched
        self.last = launched()

    def _run(self) -> None:
        self.replays += 1
        if self.replays > 1:
            self._launched()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Every graph that is made from now on."""
    def captured(chain: GroupChain, launched: Any) -> Any:
        found.append(Recorded(launched))
        return execution._Replay(found[-1], found[-1].last, chain._workspace.version)  # type: ignore[arg-type]

    found: list[Recorded] = []
    monkeypatch.setattr(GroupChain, "_captured", captured)
    return found


def momentum_by_address(group: Group, mode: str) -> Any:
    """The first launch, on a CPU."""
    momentum = kernel("momentum.library")
    problem = Problem("momentum", group.batch, group.m, group.n, 1, "float32", "float32", "row", mode)
    return momentum.build(problem, momentum.Config(), fingerprint("cpu"))


def test_replays_read_and_write_where_the_caller_says(
    captures: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, group = GramNewtonSchulz(dtype="float32"), Group(2, 6, 20)
    chain, ends = run._bound(group, CPU, torch.float32, "none", torch.float32, False)
    ends = dataclasses.replace(ends, first=momentum_by_address(group, "none"))
    monkeypatch.setattr(chain, "_graphs", True)
    outs = [torch.empty(2, 6, 20) for _ in range(6)]
    want = GramNewtonSchulz(dtype="float32")
    for turn in range(4):
        for index, out in enumerate(outs):
            x = gaussian(2, 6, 20, seed=10 * turn + index)
            given = x.mT.contiguous().mT if turn % 2 else x.view(1, 2, 6, 20)  # not as they lie; more axes
            chain.polar(given, ends, out.fill_(float("nan")))
            torch.testing.assert_close(out, want(x))
    assert len(chain._wholes) == execution.MAX_WHOLE_GRAPHS and all(graph.replays for graph in captures)


@pytest.mark.parametrize("pieces", [None, 1])
def test_a_graph_of_a_whole_step_follows_addresses_rates_and_momentum(
    pieces: int | None, captures: list[Recorded], monkeypatch: pytest.MonkeyPatch, cache_file: Path
) -> None:
    """Three batches, two of one size; each step's weights are those of launches without graphs, to the bit."""
    def resolved(planned: GroupPlan, resolver: resolve.Resolver, source: str, mode: str, *wanted: Any) -> Ends:
        found = resolve_ends(planned, resolver, source, mode, *wanted)
        first = momentum_by_address(planned.recipe.group, mode)
        return dataclasses.replace(found, first=first, weights=dict.fromkeys(planned.launches, update_by_address))

    monkeypatch.setattr(newton_schulz, "resolve_ends", resolved)
    monkeypatch.setattr("dmuon_tune.recipe.MAX_BATCH_ELEMENTS", 2 * 8 * 23)
    with Store.open(cache_file) as store:
        for batch in (2, 1):
            recipe = Recipe(Group(batch, 8, 23), "gram", "float32", chunk=pieces)
            store.put_recipe(fingerprint("cpu"), recipe)
    both = [[nn.Parameter(gaussian(8, 23, seed=i)) for i in range(5)] for _ in range(2)]
    optimizers = [Muon(weights, weight_decay=0.1) for weights in both]
    for optimizer in optimizers:
        optimizer.plan()
    chains_of_graphs = list(optimizers[0]._newton_schulz._chains.values())
    for each in chains_of_graphs:
        monkeypatch.setattr(each, "_graphs", True)
    made, phases = [], list[str]()

    def seen(name: str) -> Any:
        phases.append(name)
        return nullcontext()

    for step in range(10):
        for weights, optimizer in zip(both, optimizers, strict=True):
            optimizer.param_groups[0].update(lr=0.1 / (step + 1), momentum=0.9 if step < 5 else 0.8)
            if step == 3:
                weights[0].data = weights[0].data.clone()
            for i, weight in enumerate(weights):
                if step in (0, 2, 4, 6, 8):  # elsewhere
                    weight.grad = torch.empty(8, 23)
                assert weight.grad is not None
                weight.grad.copy_(gaussian(8, 23, seed=100 * step + i))
            if step == 7:
                optimizer._newton_schulz(torch.ones(200, 300))  # for which buffers move
            with watched(seen) if step == 8 and optimizer is optimizers[0] else nullcontext():
                optimizer.step()
        made.append(len(captures))
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other), step
    # A graph for each batch at the second step of each μ and when the buffers have moved.
    assert len(chains_of_graphs) == 2 and made[1] - made[0] == made[6] - made[5] == made[7] - made[6] == 3
    assert made[1] == made[4]
    assert {"momentum", "chain", "update"} <= set(phases)


def test_momentum_of_another_dtype_or_storage_order_is_updated_in_place() -> None:
    p = nn.Parameter(gaussian(6, 10).half())
    optimizer = Muon([p], momentum=0.5, ns_dtype="float32")
    optimizer.state[p]["momentum_buffer"] = torch.ones(10, 6).mT
    p.grad = gaussian(6, 10, seed=1).half()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], 0.5 + p.grad.float())


@pytest.fixture
def library_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that need no compilation, so that many optimizers can be made."""
    monkeypatch.setattr(untuned, "SYMMETRIC_FROM_M", {})
    monkeypatch.setattr(untuned, "FUSED", {"momentum": ("triton",)})
    monkeypatch.setattr(untuned, "UPDATE", ())


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    shapes = [(256, 512), (512, 256), (256, 512), (128, 128), (100, 77), (3, 64, 96)]
    return [nn.Parameter(gaussian(*shape, seed=i).to("cuda", dtype)) for i, shape in enumerate(shapes)]


def trained(dtype: torch.dtype, way: str, steps: int = 5) -> tuple[list[nn.Parameter], Muon]:
    """``way``: eager; graphs; moving (graphs, gradients elsewhere each step); captured (a graph of the whole step)."""
    weights = parameters(dtype)
    optimizer = Muon(weights, lr=0.1, weight_decay=0.1, graphs=way != "eager")
    kept, whole = [torch.zeros_like(p) for p in weights], torch.cuda.CUDAGraph()
    for step in range(steps):
        for i, (p, static) in enumerate(zip(weights, kept, strict=True)):
            gradient = gaussian(*p.shape, seed=100 * step + i).to("cuda", dtype)
            p.grad = gradient if way == "moving" else static.copy_(gradient)
        if way == "captured" and step == 2:
            torch.cuda.synchronize()
            with torch.cuda.graph(whole):
                optimizer.step()
        if way == "captured" and step >= 2:
            whole.replay()
        else:
            optimizer.step()
    torch.cuda.synchronize()
    return weights, optimizer


@gpu
@needs_gpu
@pytest.mark.usefixtures("library_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_launch_gives_the_same_bits(dtype: torch.dtype) -> None:
    eager, _ = trained(dtype, "eager")
    for way in ("graphs", "moving", "captured"):
        weights, optimizer = trained(dtype, way)
        assert all(torch.equal(a, b) for a, b in zip(eager, weights, strict=True)), way
        if way == "graphs":
            copy.deepcopy(optimizer)
            pickle.loads(pickle.dumps(optimizer))
            assert all(chain._replays for chain in optimizer._newton_schulz._chains.values())


@gpu
@needs_gpu
@pytest.mark.usefixtures("library_products")
def test_replays_follow_the_input_and_allocate_nothing() -> None:
    run, eager = GramNewtonSchulz("you"), GramNewtonSchulz("you", graphs=False)
    inputs: list[Any] = [gaussian(4, 192, 256, seed=i).cuda() for i in range(4)]
    larger = gaussian(8, 192, 512).cuda()
    for x in [*inputs, larger, *inputs, inputs[0].mT, *inputs]:  # the larger one moves the buffers
        assert torch.equal(run(x), eager(x))
    for x in inputs:  # results at one address: the whole chain becomes a graph, whatever the input's address
        assert torch.equal(run(x), eager(x))
    kept = [(run(x), x) for x in inputs * 3]  # results at many
    assert all(torch.equal(result, eager(x)) for result, x in kept)
    del kept
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        for x in inputs:
            run(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@gpu
@needs_gpu
@pytest.mark.usefixtures("library_products")
def test_calls_on_two_streams_wait_for_each_other() -> None:
    run = GramNewtonSchulz("you")
    x, y = gaussian(8, 256, 1024).cuda(), gaussian(8, 256, 1024, seed=1).cuda()
    want = run(x), run(y)
    side = torch.cuda.Stream()
    for _ in range(20):
        side.wait_stream(torch.cuda.current_stream())
        one = run(x)
        with torch.cuda.stream(side):
            other = run(y)
        torch.cuda.synchronize()
        assert torch.equal(one, want[0]) and torch.equal(other, want[1])


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(256, 1024), (192, 192), (256, 192)])  # the Gram form, and the plain one
def test_weights_in_the_last_product_on_a_gpu(
    library_products: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    monkeypatch.setitem(untuned.FUSED, "polar_small", ())
    results = []
    for update in ((), ("cutedsl",)):
        monkeypatch.setattr(untuned, "UPDATE", update)
        weights = [nn.Parameter(gaussian(*shape, seed=i).cuda()) for i in range(2)]
        optimizer = Muon(weights, lr=0.1, weight_decay=0.5)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)  # which graphs must not hold
            for i, weight in enumerate(weights):
                weight.grad = gaussian(*shape, seed=10 * step + i).cuda()
            optimizer.step()
        results.append([weight.detach() for weight in weights])
    (ends,) = optimizer._newton_schulz._ends.values()
    if not ends.weights:
        pytest.skip("no kernel updates weights in the last product here")
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_constants_stay_where_they_are() -> None:
    device, rows = torch.device("cpu"), [(3.4, -4.8, 2.0), (1.5, -0.5, 0.25)]
    first = Constant(device, rows).tensor()
    assert first.dtype == torch.float32 and torch.equal(first, torch.tensor(rows))
    with torch.inference_mode():
        assert Constant(device, list(rows)).tensor() is first
        other = Constant(device, rows[:1]).tensor()
    assert other.shape == (1, 3) and not other.is_inference()

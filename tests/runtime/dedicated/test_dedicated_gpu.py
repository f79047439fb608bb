"""Dedicated owners on GPUs: streams that overlap leave no bit to chance, and weights are those of gathered owners."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dmuon_tune.runtime import Muon, clip_grad_norm_, dedicate, no_sync
from dmuon_tune.runtime.distributed.whole import whole_of

from ..reference import gaussian
from .stack import clip_by_last_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEPS, WIDTH, ROWS, LR = 10, 256, 512, 0.02
DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
DELAY_CYCLES = 20_000_000  # some 10 ms of a GPU's clock
MAX_NORM = 0.01


class Block(nn.Module):
    """Two matrices of one size, which owners share evenly, or three, which they do not."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.more = nn.Linear(WIDTH, WIDTH, bias=False) if odd else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x) if self.more is None else self.more(self.norm(x))
        return x + self.down(F.gelu(self.up(hidden)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(odd=place % 2 == 1) for place in range(6))
        self.mixer, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            for seed, p in enumerate(self.parameters()):
                p.copy_(gaussian(*p.shape, seed=seed) / 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.mixer(x))


def join(rank: int, size: int, folder: str, *shape: int) -> DeviceMesh:
    torch.cuda.set_device(rank)
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group(
        "nccl", store=store, rank=rank, world_size=size, device_id=torch.device("cuda", rank)
    )
    shape = shape or (size,)
    return init_device_mesh("cuda", shape, mesh_dim_names=("nodes", "local")[-len(shape) :])


def made(mesh: DeviceMesh, dedicated: bool, **options: Any) -> Model:
    model = Model().to("cuda")
    owned = dedicate(model, mesh, **DTYPES, **options) if dedicated else None
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(**DTYPES), ignored_params=owned)
    return model


def inputs(size: int) -> Tensor:
    """For all steps, ranks and micro-batches: a copy from the host would wait for the GPU."""
    return gaussian(2 * STEPS * size, ROWS, WIDTH, seed=1000).to("cuda")


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.roll(1, 0)).square().mean()


def late(model: Model, rank: int) -> Model:
    """Let this rank's GPU be late now here, now there, so that whoever does not wait reads what is not there yet."""

    def wait(place: int) -> None:
        if (place + rank) % 3 == 0:
            torch.cuda._sleep(DELAY_CYCLES)

    def ran(place: int, result: Tensor) -> None:
        wait(place)
        result.register_hook(lambda _: wait(place + 1))

    for place, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda module, given, result, place=place: ran(place, result))
    return model


def trained(model: Model, rank: int, size: int, way: str = "plain") -> dict[str, Tensor]:
    """The weights after some steps, whole, on the CPU; the host waits for nothing meanwhile."""
    options = {"bucket_bytes": 1} if way.startswith(("alone", "early")) else {}
    optimizer = Muon(model, lr=LR, weight_decay=0.1, verbose=False, ns_dtype="float32", **options)
    given = inputs(size)
    for step in range(STEPS):
        if way == "no_sync":
            with no_sync(model):
                loss_of(model, given[size * (STEPS + step) + rank]).backward()
        by_last = {"max_norm": MAX_NORM} if "by last" in way else {}
        with optimizer.early_step(**by_last) if way.startswith("early") else nullcontext():
            loss_of(model, given[size * step + rank]).backward()
        if way == "clipped":
            clip_grad_norm_(model, MAX_NORM)
        if way == "alone, by last":
            clip_by_last_norm(optimizer, MAX_NORM)
        if way == "early, undone" and step % 2:
            for whole, p in ((whole_of(p), p) for p in model.parameters()):
                if whole is not None and whole.is_here:
                    p.grad.mul_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if way == "evaluated":
            with torch.no_grad():
                loss_of(model, given[step])
    if way.startswith("early"):
        assert optimizer.traffic is not None and optimizer.traffic.early_runs >= STEPS
        assert bool(optimizer.traffic.undone_runs) == (way == "early, undone")
    return {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}


def far(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest distance of a matrix over the length of its way."""
    return max(
        float((found[name] - want).norm() / (STEPS**0.5 * LR * min(want.shape) ** 0.5))
        for name, want in wanted.items() if want.ndim == 2 and "head" not in name
    )


def of_rank(rank: int, size: int, folder: str) -> None:
    mesh = join(rank, size, folder)
    found = {f"gathered, {way}": trained(made(mesh, dedicated=False), rank, size, way) for way in ("plain", "clipped")}
    found["dedicated"] = trained(made(mesh, dedicated=True), rank, size)
    found["late"] = trained(late(made(mesh, dedicated=True), rank), rank, size)
    found["kept"] = trained(made(mesh, dedicated=True, reshard_after_forward=False), rank, size)
    for way in ("evaluated", "clipped", "no_sync"):
        found[way] = trained(made(mesh, dedicated=True), rank, size, way)
    found["no_sync, late"] = trained(late(made(mesh, dedicated=True), rank), rank, size, "no_sync")
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_weights_are_those_of_gathered_owners_whoever_is_late(tmp_path: Path) -> None:
    multiprocessing.spawn(of_rank, (2, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for found in ranks:
        for name, value in found["dedicated"].items():
            for how in ("late", "kept", "evaluated"):
                assert torch.equal(found[how][name], value), (how, name)
            assert torch.equal(ranks[0]["dedicated"][name], value), name
            assert torch.equal(found["no_sync"][name], found["no_sync, late"][name]), name
        # Products of fp32 whose last one ends otherwise; gradients of bf16 weights that a rounding has moved.
        assert far(found["dedicated"], found["gathered, plain"]) < 0.05
        assert far(found["clipped"], found["gathered, clipped"]) < 0.05
        assert far(found["no_sync"], found["gathered, plain"]) > 0.05, "other gradients"


def is_beside(model: Model) -> bool:
    """Whether a batch comes to its end on the GPU while that is still busy with the backward."""
    optimizer, whole = Muon(model, lr=LR, verbose=False, bucket_bytes=1), whole_of(model.blocks[-1].down.weight)
    given = inputs(1)
    assert whole is not None
    for step in range(4):
        if step == 3:
            model.blocks[0].up.weight.register_hook(lambda _: torch.cuda._sleep(100 * DELAY_CYCLES))
        torch.cuda.synchronize()
        before = whole.updated
        with optimizer.early_step():
            loss_of(model, given[step]).backward()
        for _ in range(300):
            if whole.updated is not before and whole.updated.query():
                break
            time.sleep(0.001)
        found = whole.updated is not before and whole.updated.query() and not torch.cuda.current_stream().query()
        optimizer.step()
        optimizer.zero_grad()
    return found


def early_of_rank(rank: int, size: int, folder: str) -> None:
    mesh = join(rank, size, folder)
    found = {way: trained(made(mesh, dedicated=True), rank, size, way) for way in ("alone", "early", "early, undone")}
    for way in ("early, late", "early, undone, late"):
        found[way] = trained(late(made(mesh, dedicated=True), rank), rank, size, way.removesuffix(", late"))
    ways = ("alone, by last", "early, by last")
    clipped = {way: trained(made(mesh, dedicated=True), rank, size, way) for way in ways}
    clipped["late"] = trained(late(made(mesh, dedicated=True), rank), rank, size, "early, by last")
    assert size > 1 or is_beside(made(mesh, dedicated=True))
    torch.save([found, clipped], f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_begins_in_a_backward_gives_the_same_bits(tmp_path: Path, size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} CUDA devices")
    multiprocessing.spawn(early_of_rank, (size, str(tmp_path)), nprocs=size)
    for rank in range(size):
        for every in torch.load(tmp_path / f"{rank}.pt"):
            plain, *others = every.values()
            for found in others:
                assert all(torch.equal(found[name], value) for name, value in plain.items())


def in_two_levels(rank: int, size: int, folder: str) -> None:
    mesh = join(rank, size, folder, 2, 2)
    found = {how: trained(model, rank, size) for how, model in (
        ("gathered", made(mesh, dedicated=False)), ("dedicated", made(mesh, dedicated=True)),
        ("late", late(made(mesh, dedicated=True), rank)),
    )}
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four CUDA devices")
def test_two_levels(tmp_path: Path) -> None:
    multiprocessing.spawn(in_two_levels, (4, str(tmp_path)), nprocs=4)
    for rank in range(4):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(found["late"][name], value) for name, value in found["dedicated"].items())
        assert far(found["dedicated"], found["gathered"]) < 0.05


def memory_of_rank(rank: int, size: int, folder: str, early: bool) -> None:
    mesh = join(rank, size, folder)
    model = made(mesh, dedicated=True)
    optimizer, given, held = Muon(model, lr=LR, verbose=False, graphs=False), inputs(size), []
    for steps in (4, 20):
        for step in range(steps):
            with optimizer.early_step() if early else nullcontext():
                loss_of(model, given[step % STEPS]).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    torch.save(held, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize(("size", "early"), [(1, True), (2, False)])
def test_nothing_is_kept_from_step_to_step(tmp_path: Path, size: int, early: bool) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} CUDA devices")
    multiprocessing.spawn(memory_of_rank, (size, str(tmp_path), early), nprocs=size)
    for rank in range(size):
        before, after = torch.load(tmp_path / f"{rank}.pt")
        assert after <= before

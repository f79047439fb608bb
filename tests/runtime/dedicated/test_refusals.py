"""What cannot be dedicated is refused by name, on every rank, in one line that says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from dmuon_tune.errors import DmuonTuneError, PeerError, UsageError
from dmuon_tune.runtime import Muon, dedicate, no_sync

from ..distributed.layouts import TENSOR_PARALLEL, Layer, mesh_of
from ..distributed.world import Worlds
from .stack import WIDTH, Stack, dedicated, loss_of


def tied(rank: int, size: int) -> None:
    model = Stack()
    model.blocks[3].weight = model.mixer.weight
    dedicate(model, mesh_of("fsdp", size))


def sharded_first(rank: int, size: int) -> None:
    dedicate(fully_shard(Stack(), mesh=mesh_of("fsdp", size)), mesh_of("fsdp", size))


def tensor_parallel(rank: int, size: int) -> None:
    model = nn.ModuleList([Layer(50)])
    parallelize_module(model[0], mesh_of("fsdp", size), dict(TENSOR_PARALLEL))
    dedicate(model, mesh_of("fsdp", size))


def on_meta(rank: int, size: int) -> None:
    dedicate(nn.Linear(8, 8, device="meta"), mesh_of("fsdp", size))


def twice(rank: int, size: int) -> None:
    dedicate(dedicated(size), mesh_of("fsdp", size))


def without_matrices(rank: int, size: int) -> None:
    dedicate(Stack(), mesh_of("fsdp", size), exclude=("*",))


def in_half(rank: int, size: int) -> None:
    dedicate(Stack(), mesh_of("fsdp", size), param_dtype="float16")


def of_two_dtypes(rank: int, size: int) -> None:
    model = Stack()
    model.mixer.bfloat16()
    dedicate(model, mesh_of("fsdp", size))


def in_distributed_data_parallel(rank: int, size: int) -> None:
    dedicate(nn.parallel.DistributedDataParallel(Stack()), mesh_of("fsdp", size))


def not_ignored(rank: int, size: int) -> None:
    model = Stack()
    dedicate(model, mesh_of("fsdp", size))
    fully_shard(model, mesh=mesh_of("fsdp", size))


def replaced(rank: int, size: int) -> None:
    model = dedicated(size)
    model.mixer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    loss_of(model, 0)


def muon_first(rank: int, size: int) -> None:
    model = Stack()
    optimizer = Muon(model, verbose=False)
    dedicate(model, mesh_of("fsdp", size))
    optimizer.step()


def moved_by_others(rank: int, size: int) -> None:
    model = dedicated(size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss_of(model, 0).backward()
    optimizer.step()


def no_part(rank: int, size: int) -> None:
    dedicate(Stack(), mesh_of("fsdp", size), units=[nn.Linear(2, 2)])


def of_itself(rank: int, size: int) -> None:
    model = Stack()
    dedicate(model, mesh_of("fsdp", size), units=[model])


def of_no_dtype(rank: int, size: int) -> None:
    dedicate(Stack(), mesh_of("fsdp", size), reduce_dtype="bf17")


def without_a_mesh(rank: int, size: int) -> None:
    dedicate(Stack(), None)  # type: ignore[arg-type]


def of_no_model(rank: int, size: int) -> None:
    with no_sync(None):  # type: ignore[arg-type]
        pass


def averaged_otherwise(rank: int, size: int) -> None:
    dedicate(Stack(), mesh_of("fsdp", size), reduce_dtype="float32" if rank else "float64")


def on_one_rank(rank: int, size: int) -> None:
    dedicate(Stack(), mesh_of("fsdp", size), exclude=("mixer.*",) if rank else ())


def in_no_time_on_one_rank(rank: int, size: int) -> None:
    dedicate(Stack(), mesh_of("fsdp", size), timeout=-1.0 if rank else 30.0)


def with_layers_of_none(rank: int, size: int) -> None:
    dedicate(Stack(), mesh_of("fsdp", size), layers=3 if rank else None)  # type: ignore[arg-type]


def on_a_mesh_of_none(rank: int, size: int) -> None:
    dedicate(Stack(), 3 if rank else mesh_of("fsdp", size))  # type: ignore[arg-type]


def cleared_on_one_rank(rank: int, size: int) -> None:
    model = dedicated(size)
    optimizer = Muon(model, verbose=False)
    loss_of(model, 0).backward()
    if rank:
        optimizer.zero_grad()
    optimizer.step()


def in_other_times(rank: int, size: int) -> None:
    dedicate(Stack(), mesh_of("fsdp", size), timeout=30.0 + rank)


def converted(rank: int, size: int) -> None:
    loss_of(dedicated(size).bfloat16(), 0)


def rest_is_whole(rank: int, size: int) -> None:
    model = Stack()
    dedicate(model, mesh_of("fsdp", size))
    Muon(model, verbose=False).plan()


def others_for_muon(rank: int, size: int) -> None:
    Muon(dedicated(size), exclude=("mixer.*",), verbose=False).plan()


def not_dedicated(rank: int, size: int) -> None:
    with no_sync(Stack()):
        pass


def of_another_shape(rank: int, size: int) -> None:
    model = dedicated(size)
    state = model.state_dict()
    state["mixer.weight"] = torch.zeros(3, 4)
    model.load_state_dict(state)


def assigned(rank: int, size: int) -> None:
    model = dedicated(size)
    model.load_state_dict(model.state_dict(), assign=True)


def of_three_dimensions(rank: int, size: int) -> None:
    dedicate(Stack(), init_device_mesh("cpu", (1, 2, 1)))


def copied(rank: int, size: int) -> None:
    copy.deepcopy(dedicated(size).blocks)


def elsewhere(rank: int, size: int) -> None:
    group = torch.distributed.new_group([0, 1])
    Muon(dedicated(size), process_group=group, verbose=False)


@pytest.mark.parametrize(("case", "said"), [
    (tied, "mixer.weight: it is tied to blocks.3.weight|blocks.3.weight: it is tied to mixer.weight"),
    (sharded_first, "blocks.0.weight: it is a DTensor: call dedicate before fully_shard"),
    (tensor_parallel, "0.qkv.weight: it is a DTensor"), (on_meta, "weight: it is on the meta device"),
    (twice, "blocks.0.weight: it is dedicated already"), (without_matrices, "Stack has no matrices to dedicate"),
    (in_half, "averaged in torch.float16; give reduce_dtype=torch.float32"),
    (of_two_dtypes, "matrices are of torch.bfloat16 and torch.float32; give param_dtype"),
    (in_distributed_data_parallel, "DistributedDataParallel averages gradients itself"),
    (not_ignored, "blocks.0.weight is dedicated, and not here; .*ignored_params="),
    (replaced, "mixer.weight was dedicated, and has been replaced since"),
    (muon_first, "blocks.0.weight is dedicated, and this Muon cannot move it; make Muon"),
    (moved_by_others, "blocks.0.weight is dedicated, and this AdamW cannot"),
    (no_part, "units: Linear is no part of the model"), (of_itself, "units: Stack is the model itself"),
    (of_no_dtype, "reduce_dtype must be such as float32"), (without_a_mesh, "mesh must be a DeviceMesh, not None"),
    (of_no_model, "model must be a Module, not None"),
    (averaged_otherwise, "reduce_dtype is torch.float32 on rank 1 and torch.float64 on rank 0; give all"),
    (on_one_rank, r"dedicated\[5\] is None on rank 1 and mixer.weight on rank 0; give all ranks the same"),
    (in_other_times, "timeout is 31.0 on rank 1 and 30.0 on rank 0; give all"),
    (with_layers_of_none, "layers must be a Layers, not 3"),
    (on_a_mesh_of_none, "mesh must be a DeviceMesh, not 3"),
    (cleared_on_one_rank, "it has a gradient on some ranks only, .*; call zero_grad on all ranks alike"),
    (in_no_time_on_one_rank, r"timeout must be a number of seconds in \(0, 1e\+09\], not -1.0"),
    (converted, "mixer.weight is dedicated, and was converted to torch.bfloat16 on cpu since"),
    (rest_is_whole, "'embedding.weight' is neither dedicated nor sharded; call fully_shard"),
    (others_for_muon, "'mixer.weight' is dedicated, and AdamW's here"), (not_dedicated, "call dedicate first"),
    (of_another_shape, r"mixer.weight is \(12, 12\), in the state dict \(3, 4\)"),
    (assigned, "load it without assign=True"), (of_three_dimensions, "the mesh has 3 dimensions"),
    (copied, "blocks.0.weight is dedicated, and cannot be copied"), (elsewhere, "process_group must be the ranks that"),
], ids=lambda given: given.__name__ if callable(given) else "")
def test_it_is_refused(worlds: Worlds, case: Callable[[int, int], None], said: str) -> None:
    worlds(2).run(refused, case, said)


def refused(rank: int, size: int, case: Callable[[int, int], None], said: str) -> None:
    with pytest.raises(DmuonTuneError, match=said) as raised:
        case(rank, size)
    assert isinstance(raised.value, UsageError | PeerError) and "\n" not in str(raised.value)


def loaded(rank: int, size: int) -> list[str]:
    """Whole tensors on every rank, or on the first alone; shards, and those without a key."""
    model = dedicated(size)
    first = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    check(model, first)
    more = {name: value + 1 for name, value in first.items()}
    set_model_state_dict(model, dict(more), options=StateDictOptions(full_state_dict=True))
    check(model, more)
    least = {name: value - 1 for name, value in first.items()} if rank == 0 else {}
    set_model_state_dict(model, least, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    check(model, {name: value - 1 for name, value in first.items()})
    shards = dedicated(size).state_dict()
    model.load_state_dict(shards)
    check(model, first)
    del shards["blocks.1.weight"]
    found = model.load_state_dict(shards, strict=False)
    with pytest.raises(RuntimeError, match="Missing key.*blocks.1.weight"):
        model.load_state_dict(shards)
    check(model, first)
    return list(found.missing_keys)


def check(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), wanted[name]), name


def test_state_dicts_of_all_forms(worlds: Worlds) -> None:
    assert worlds(2).run(loaded) == [["blocks.1.weight"]] * 2

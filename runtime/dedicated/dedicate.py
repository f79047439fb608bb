"""``dedicate``: gives every matrix of a model to an owner, before ``fully_shard`` takes the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from dmuon_tune import checks
from dmuon_tune.cache import Layers
from dmuon_tune.errors import UsageError

from ..blocks import Split
from ..mode import check_timeout
from ..newton_schulz import GramNewtonSchulz
from ..parameters import dtype_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def dedicate(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: str | torch.dtype | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    units: Iterable[nn.Module] | None = None,
    reshard_after_forward: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    splits: Mapping[str, Sequence[int] | Split] | None = None,
    flatten: Sequence[str] = (),
    layers: Layers | None = None,
    timeout: float = 600.0,
) -> set[nn.Parameter]:
    """Give each of the model's matrices an owner among the ranks of ``mesh``, which all call this together.

    Returns the parameters, for ``fully_shard(..., ignored_params=)`` of the rest; then ``Muon(model)`` finds them.
    Which they are is :class:`Muon`'s rule, with the same ``include``, ``exclude``, ``splits`` and ``flatten``, of those
    that need a gradient. The owner keeps a weight as it is, and its momentum; all ranks have it in ``param_dtype``
    (default: its own) while ``units`` (default: the entries of ModuleLists and Sequentials), in the order in which they
    run, use it. ``reshard_after_forward`` False keeps it until the backward. Gradients are averaged in ``reduce_dtype``
    (default: ``param_dtype``). ``layers``: the caches by whose costs owners are chosen; ``timeout``: seconds after
    which a wait for other ranks ends in an error. docs/dedicated.md has the whole. Raises UsageError, by name, on all
    ranks, for what cannot be dedicated.
    """
    from torch.distributed.device_mesh import DeviceMesh  # these import DTensor, which one process does without

    from ..distributed.control import Control
    from .chosen import candidates_of, dtypes_of, units_of
    from .grid import Grid
    from .model import DedicatedModel
    from .owners import owners_of

    checks.instance("model", model, nn.Module, or_none=False)
    checks.instance("mesh", mesh, DeviceMesh, or_none=False)
    checks.flag("reshard_after_forward", reshard_after_forward)
    control = Control(_group_of(mesh), check_timeout(timeout))
    said, options, error = list[object](), dict[str, object](), None
    try:
        found = candidates_of(model, include, exclude, splits, flatten)
        dtypes = dtypes_of(found, dtype_of("param_dtype", param_dtype), dtype_of("reduce_dtype", reduce_dtype))
        parts = units_of(model, units, found)
        grid = Grid.of(mesh, control.group)
        said += [[each.name, str(each.dtype), each.shapes] for each in found.values()]
        options = {
            "param_dtype and reduce_dtype": list(map(str, dtypes)), "units": [name for name, _, _ in parts],
            "reshard_after_forward": reshard_after_forward,
        }
    except Exception as raised:
        error = raised
    control.agree("dedicate", error=error)
    for what, given in {"dedicated matrices": said, **options}.items():
        control.same(given, what)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    assignment = owners_of(list(found.values()), GramNewtonSchulz(layers=layers), device, control)
    owners = dict(zip(found, assignment.owner, strict=True))
    DedicatedModel(model, parts, found, owners, dtypes, reshard_after_forward, mesh, grid, device, control, assignment)
    return set(found)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside add gradients up on each rank and send nothing, FSDP2's neither; one outside sends the sums."""
    from torch.distributed.fsdp import FSDPModule

    from ..distributed.whole import keepers_of

    checks.instance("model", model, nn.Module, or_none=False)
    keepers = keepers_of(model.parameters())
    if not keepers:
        raise UsageError(f"no_sync: {type(model).__name__} has no dedicated matrices; call dedicate first")

    def reduce(now: bool) -> bool:
        before = [keeper.set_reduces(now) for keeper in keepers]
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)
        return before[0]

    before = reduce(False)
    try:
        yield
    finally:
        reduce(before)


def _group_of(mesh: DeviceMesh) -> ProcessGroup:
    """That of all of the mesh's ranks."""
    import torch.distributed as dist

    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if mesh.ndim == 1:
        return mesh.get_group()
    found: ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, group_desc="dmuon_tune dedicated")
    return found

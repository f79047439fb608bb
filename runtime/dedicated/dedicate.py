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
from ..mode import check_timeout, choice_kept, keep_choice
from ..newton_schulz import GramNewtonSchulz
from ..ownership_options import OwnershipOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.control import Control
    from .chosen import Chosen

MODES = ("dedicated", "auto", "gather")


def dedicate(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: str = "dedicated",
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
    ownership: OwnershipOptions | None = None,
) -> set[nn.Parameter]:
    """Give each of the model's matrices an owner among the ranks of ``mesh``, which all call this together.

    Returns the parameters, for ``fully_shard(..., ignored_params=)`` of the rest; then ``Muon(model)`` finds them.
    ``mode`` ``auto`` leaves the model as it is, and returns none, where dedicated owners are not possible or would be
    uneven; ``gather`` always does.
    Which they are is :class:`Muon`'s rule, with the same ``include``, ``exclude``, ``splits`` and ``flatten``, of those
    that need a gradient. The owner keeps a weight as it is, and its momentum; all ranks have it in ``param_dtype``
    (default: its own) while ``units`` (default: the entries of ModuleLists and Sequentials), in the order in which they
    run, use it. ``reshard_after_forward`` False keeps it until the backward. Gradients are averaged in ``reduce_dtype``
    (default: ``param_dtype``). ``layers``: the caches by whose costs owners are chosen, ``ownership``: how, as Muon's;
    ``timeout``: seconds after which a wait for other ranks ends in an error. docs/dedicated.md has the whole. Raises
    UsageError, by name, on all ranks, for what cannot be dedicated.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh  # these import DTensor, which one process does without

    from ..distributed.control import TIMEOUT_S, Control
    from .chosen import agreed, chosen_of

    seconds, error = TIMEOUT_S, None
    try:
        seconds = check_timeout(timeout)  # by which this rank, too, waits for the others to hear of what follows
        checks.instance("mesh", mesh, DeviceMesh, or_none=False)
        checks.instance("model", model, nn.Module, or_none=False)
        checks.one_of("mode", mode, MODES)
        checks.flag("reshard_after_forward", reshard_after_forward)
        checks.instance("layers", layers, Layers)
        checks.instance("ownership", ownership, OwnershipOptions)
    except UsageError as raised:
        if not dist.is_initialized():
            raise
        error = raised
    control = Control(_group_of(mesh) if isinstance(mesh, DeviceMesh) else dist.group.WORLD, seconds)
    control.agree("dedicate", error=error)
    search = ownership or OwnershipOptions()
    dtypes, patterns = (param_dtype, reduce_dtype), (include, exclude, splits, flatten)
    chosen, why = agreed(
        control, mode, {"reshard_after_forward": reshard_after_forward, "timeout": seconds, "ownership": vars(search)},
        lambda: chosen_of(model, mesh, control.group, dtypes, units, *patterns),
    )
    even = False
    if chosen is not None:
        chains = GramNewtonSchulz(layers=layers)
        even, why = _divide(model, mesh, control, mode, chosen, reshard_after_forward, chains, search)
    if chosen is None or not even:
        keep_choice(model, "gather", f"dedicate left it to gathered owners: {why}")
        return set()
    keep_choice(model, "dedicated", why)
    return set(chosen.found)


def _divide(
    model: nn.Module, mesh: DeviceMesh, control: Control, mode: str, chosen: Chosen, reshard: bool,
    chains: GramNewtonSchulz, search: OwnershipOptions,
) -> tuple[bool, str]:
    """Whether owners have been given what is chosen, by the rule or as asked, and why."""
    from .model import DedicatedModel
    from .owners import owners_of
    from .rule import is_even

    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    assignment, divided_us = owners_of(list(chosen.found.values()), chains, device, control, search)
    owners = dict(zip(chosen.found, assignment.owner, strict=True))
    units = [some for *_, some in chosen.parts]
    even, why = is_even(units, owners, chosen.grid, assignment.makespan_us, divided_us)
    if not even and mode == "auto":
        return False, why
    DedicatedModel(model, chosen, owners, reshard, mesh, device, control, assignment)
    return True, why if mode == "auto" else f"as asked; {why}"


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside add gradients up on each rank and send nothing, FSDP2's neither; one outside sends the sums."""
    from torch.distributed.fsdp import FSDPModule

    from ..distributed.whole import keepers_of

    checks.instance("model", model, nn.Module, or_none=False)
    keepers = keepers_of(model.parameters())
    if not keepers and choice_kept(model) is None:  # dedicate may have left it to gathered owners
        raise UsageError(f"no_sync: {type(model).__name__} has no dedicated matrices; call dedicate first")

    def reduce(now: bool) -> bool:
        before = [keeper.set_reduces(now) for keeper in keepers]
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)
        return all(before)

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

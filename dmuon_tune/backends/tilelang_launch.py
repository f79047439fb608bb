"""What a TileLang program launches on a GPU, as data read from its lowered host code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmuon_tune.portable import NotPortableError
from dmuon_tune.spec import Argument

from .cuda_launches import CudaCall, Kernel, Launch, Parameter, Patch, places_of
from .driver import (
    CLUSTER_DIMENSION,
    DEFAULT_DYNAMIC_SMEM_BYTES,
    MAX_DYNAMIC_SMEM,
    PROGRAMMATIC_SERIALIZATION,
    TensorMap,
)

POINTER_BYTES = 8
CREATE_TILED = "__tvm_tensormap_create_tiled"
AXES = "xyz"


def record(artifact: Any, names: Sequence[str], arguments: Sequence[Argument]) -> CudaCall:
    """A call of a lowered program (``device_mod``, ``host_mod``) of one kernel; ``names`` are those of its parameters,
    in the op's order. Raises NotPortableError where it does something that is not known here."""
    functions = list(artifact.device_mod.functions.items())
    if len(functions) != 1:
        raise NotPortableError(f"it has {len(functions)} kernels, one can be recorded")
    name, function = functions[0][0].name_hint, functions[0][1]
    attributes = function.attrs
    if attributes.get("use_cooperative_groups"):
        raise NotPortableError("it is launched as a cooperative grid")
    host = next(iter(artifact.host_mod.functions.values()))
    maps = host.attrs.get("tma_descriptor_args") or {}
    passed = _passed(host, name, len(function.params))
    parameters = tuple(
        _parameter(own.name, given, names, maps, arguments) for own, given in zip(function.params, passed, strict=True)
    )
    smem_bytes = int(attributes.get("dyn_shared_memory_buf") or 0)
    set_attributes = ((MAX_DYNAMIC_SMEM, smem_bytes),) if smem_bytes > DEFAULT_DYNAMIC_SMEM_BYTES else ()
    block, grid = (_extents(attributes["thread_extent"], prefix) for prefix in ("threadIdx", "blockIdx"))
    tensors = {place for place, argument in enumerate(arguments) if argument.role != "scalar"}
    kernel = Kernel(
        0, name, block, smem_bytes, set_attributes, _launch_attributes(attributes), places_of(parameters, tensors)
    )
    return CudaCall(len(arguments), (kernel,), (Launch(0, grid, parameters),))


def _passed(host: Any, name: str, count: int) -> list[Any]:
    """The expressions that host code passes to the kernel ``name``."""
    from tilelang import tvm  # type: ignore[import-untyped, unused-ignore]

    found: list[list[Any]] = []

    def visit(node: Any) -> None:
        if isinstance(node, tvm.tirx.Call) and node.op == tvm.ir.Op.get("tirx.tvm_call_packed"):
            if node.args and str(getattr(node.args[0], "value", node.args[0])) == name:
                found.append(list(node.args[1 : 1 + count]))

    tvm.tirx.stmt_functor.post_order_visit(host.body, visit)
    if len(found) != 1 or len(found[0]) != count:
        raise NotPortableError(f"its host code calls {name} {len(found)} times")
    return found[0]


def _parameter(
    name: str, passed: Any, names: Sequence[str], maps: Mapping[Any, Any], arguments: Sequence[Argument]
) -> Parameter:
    described = next((given for handle, given in maps.items() if handle.same_as(passed)), None)
    if described is not None:
        tensor_map, tensor = _tensor_map(described)
        return Parameter(tensor_map=tensor_map, tensor=_index(tensor, names))
    index = _index(name, names)
    if arguments[index].role != "scalar":
        return Parameter(bytes(POINTER_BYTES).hex(), (Patch(0, "tensor", index),))
    return Parameter(bytes(4).hex(), (Patch(0, "float32", index),))


def _index(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise NotPortableError(f"its kernel takes {name}, which is none of {', '.join(names)}")
    return list(names).index(name)


def _tensor_map(described: Sequence[Any]) -> tuple[TensorMap, str]:
    """The map, and the name of the tensor it is of. TileLang names axes innermost first; its strides (bytes) begin with
    the innermost one, which the driver is not given."""
    create, _, dtype, rank, address, *rest = described
    if str(create.value) != CREATE_TILED:
        raise NotPortableError(f"it makes a tensor map by {create.value}")
    count = int(rank)
    numbers = [int(value) for value in rest]
    dims, strides, box, steps = (tuple(numbers[place * count : (place + 1) * count]) for place in range(4))
    interleave, swizzle, l2_promotion, fill = numbers[4 * count : 4 * count + 4]
    tensor_map = TensorMap(
        int(dtype), dims, strides[1:], box, steps, interleave, swizzle, l2_promotion, fill
    )
    return tensor_map, str(address.name)


def _extents(extents: Mapping[str, Any], prefix: str) -> tuple[int, ...]:
    return tuple(int(extents.get(f"{prefix}.{axis}", 1)) for axis in AXES)


def _launch_attributes(attributes: Any) -> tuple[tuple[int, str], ...]:
    found = []
    if attributes.get("cluster_dims"):
        cluster = b"".join(int(extent).to_bytes(4, "little") for extent in attributes["cluster_dims"])
        found.append((CLUSTER_DIMENSION, cluster.hex()))
    if attributes.get("has_cuda_pdl_sync"):
        found.append((PROGRAMMATIC_SERIALIZATION, (1).to_bytes(4, "little").hex()))
    return tuple(found)

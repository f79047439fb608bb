"""Portable code of each DSL: what a program launches is read without a GPU, and on one it gives the compiled bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon_tune.backends import backends, load_portable, makes_portable, tilelang, triton_launch
from dmuon_tune.backends.cuda_launches import CudaCall, Patch, Scratch
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.measure.build import compile_kernel, compile_portable
from dmuon_tune.measure.verify import allocate, as_launched, in_launch_order, random_scalars, verify
from dmuon_tune.portable import NotPortableError, PortableCode
from dmuon_tune.problem import Problem

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
GRAM = Problem("gram", 2, 192, 192, 264)
POLAR = Problem("polar_small", 2, 128, 1024, 128, "bfloat16", "bfloat16", "row", "s5r2")
# One problem of each op and argument list, ragged where the kernel serves it.
PROBLEMS = {
    "gram": GRAM,
    "gemm_symmetric": Problem("gemm_symmetric", 3, 200, 200, 200, epilogue="ci"),
    "apply": Problem("apply", 2, 136, 320, 136, layout="col", epilogue="c"),
    "apply+w": Problem("apply", 2, 128, 264, 128, out_dtype="bfloat16", epilogue="w"),
    "polar_small": Problem("polar_small", 5, 64, 200, 64, epilogue="s5r2"),
    "polar_small+2": POLAR,
    "momentum": Problem("momentum", 3, 96, 200, 1, "bfloat16", "float16", "row", "n"),
}
DSLS = ("cutedsl", "tilelang", "triton")


def available(backend: str) -> None:
    reason = backends()[backend].unavailable(H200)
    if reason:
        pytest.skip(reason)


def through_json(code: PortableCode) -> PortableCode:
    return replace(code, launch=json.loads(json.dumps(code.launch)))


def tensors(call: CudaCall) -> list[list[int]]:
    """Which of the op's tensors each parameter of each launch is of; scalars and constants left out."""
    return [
        [
            parameter.tensor if parameter.tensor_map else parameter.patches[0].index
            for parameter in launch.parameters
            if parameter.tensor_map or (parameter.patches and parameter.patches[0].kind == "tensor")
        ]
        for launch in call.launches
    ]


def test_every_dsl_of_this_project_makes_portable_code_and_no_library() -> None:
    assert all(map(makes_portable, DSLS)) and not makes_portable("library") and not makes_portable("quack")


def test_a_cutedsl_programs_own_host_code_is_recorded() -> None:
    available("cutedsl")
    spec = kernel("gram.cutedsl")
    code = through_json(compile_portable(spec, GRAM, spec.untuned(GRAM, H200), H200))
    call = CudaCall.from_dict(code.launch)
    (launched,), (launch,) = call.kernels, call.launches
    assert set(tensors(call)[0]) == {0, 1} and call.arguments == 3
    scalars = [patch for parameter in launch.parameters for patch in parameter.patches if patch.kind != "tensor"]
    assert scalars == [Patch(0, "float32", 2)]
    maps = [bytes.fromhex(parameter.data) for parameter in launch.parameters if parameter.size_bytes == 128]
    assert len(maps) >= 2 and all(any(data[8:64]) and not any(data[64:]) for data in maps)
    assert {index for place in launched.aligned for index in launch.parameters[place].tensors} == {0, 1}
    assert dict(launched.attributes)[8] == launched.smem_bytes <= H200.smem_per_block_bytes
    assert dict(launched.launch_attributes)[6] == "01000000"  # it may start before the launch in front ends


def test_a_tilelang_programs_tensor_maps_are_read_from_its_host_code() -> None:
    available("tilelang")
    spec = kernel("gram.tilelang")
    config = spec.Config(tile_m=64, tile_n=64, tile_k=64, stages=2, threads=128)
    backends()["tilelang"].load()  # type: ignore[attr-defined]
    program = spec.build(GRAM, config, H200)
    call = tilelang.recorded(program, H200, ops()["gram"].arguments(GRAM))
    (launch,), (launched,) = call.launches, call.kernels
    assert sorted(set(tensors(call)[0])) == [0, 1] and launch.grid == (2 * 6, 1, 1)
    operand = next(parameter for parameter in launch.parameters if parameter.tensor_map and parameter.tensor == 0)
    assert operand.tensor_map is not None
    assert operand.tensor_map.dims == (264, 192, 2) and operand.tensor_map.strides == (528, 528 * 192)
    assert [patch for parameter in launch.parameters for patch in parameter.patches if patch.kind == "float32"] == [
        Patch(0, "float32", 2)
    ]
    with pytest.raises(NotPortableError, match="other code each time"):
        tilelang.recorded(program, H200, ops()["gram"].arguments(GRAM), "void gram_kernel(float alpha) {}")
    assert launched.name == "gram_kernel" and launched.block[0] >= 128 and launched.otherwise == -1
    assert {index for place in launched.aligned for index in launch.parameters[place].tensors} == {0, 1}


def test_a_triton_programs_buffers_and_what_it_clears_are_recorded() -> None:
    available("triton")
    spec = kernel("polar_small.triton")
    config = next(each for each in spec.legal_space(POLAR, H200) if each.form == "gram" and each.blocks == 2)
    program = spec.build(POLAR, config, H200)
    found = triton_launch._Recording(program, ops()["polar_small"].arguments(POLAR), 0)
    (place, grid, parameters), = found.launches
    assert (place, grid) == (0, (4, 1, 1))
    assert [parameter.patches[0] for parameter in parameters] == [
        Patch(0, "tensor", 0), Patch(0, "tensor", 1), Patch(0, "tensor", 2), Patch(0, "float32", 3),
        Patch(0, "scratch", 0),
    ]
    assert found.scratch == [Scratch(4 * (2 + 4 + 2 * 4 * 128**2), zeroed_bytes=4 * 2)]


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (lambda run: lambda x, r, alpha: run((1, 1, 1), x, r, 2 * alpha), "computes with the scalars"),
        (lambda run: lambda x, r, alpha: run((1, 1, 1), x + 1, r, alpha), "calls aten.add"),
        (lambda run: lambda x, r, alpha: run((1, 1, 1), x[1:], r, alpha), "neither an argument nor a buffer"),
    ],
)
def test_host_code_that_does_more_than_launch_is_refused(host: Callable[..., Any], reason: str) -> None:
    class Launched:
        types = {"x": "*fp16", "r": "*fp16", "alpha": "fp32"}

    class Program:
        kernels = (Launched,)

    Program.host = staticmethod(host)  # type: ignore[attr-defined]
    with pytest.raises(NotPortableError, match=reason):
        triton_launch.record(Program, [], ops()["gram"].arguments(GRAM))


def outputs(launch: Callable[..., Any], problem: Problem, through_graph: bool = False) -> list[torch.Tensor]:
    """What a launch writes, from the same inputs each time; in a graph that another stream replays."""
    op = ops()[problem.op]
    inputs = op.make_inputs(problem, "cuda", 7)
    values = in_launch_order(op, problem, inputs, allocate(op, problem, "cuda"), random_scalars(op, problem, 7))
    passed = as_launched(op, problem, values)
    torch.cuda.synchronize()
    if through_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(*passed)
        graph.replay()
    else:
        launch(*passed)
    torch.cuda.synchronize()
    written = [argument.role in ("output", "inout") for argument in op.arguments(problem)]
    return [value for value, is_written in zip(values, written, strict=True) if is_written]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend", DSLS)
def test_on_a_gpu_portable_code_gives_the_compiled_kernels_bits(backend: str, name: str, tmp_path: Path) -> None:
    problem, device = PROBLEMS[name], fingerprint("cuda")
    if reason := backends()[backend].unavailable(device):
        pytest.skip(reason)
    specs = [spec for spec in map(kernel, [f"{problem.op}.{backend}"] if known(problem.op, backend) else [])]
    if not specs or not specs[0].serves(problem, device):
        pytest.skip(f"no {backend} kernel of {problem.label()}")
    config = specs[0].untuned(problem, device)
    compiled = compile_kernel(specs[0], problem, config, device).launch
    loaded = load_portable(through_json(compile_portable(specs[0], problem, config, device)), tmp_path / "none")
    assert verify(loaded, ops()[problem.op], problem, "cuda", 3).failure == ""
    expected = outputs(compiled, problem)
    for through_graph in (False, True):
        found = outputs(loaded, problem, through_graph)
        assert all(
            torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            for one, other in zip(expected, found, strict=True)
        )


def known(op: str, backend: str) -> bool:
    from dmuon_tune.kernel_specs import kernels

    return any(spec.name == f"{op}.{backend}" for spec in kernels(op))


@pytest.mark.gpu
def test_on_a_gpu_another_architectures_code_is_refused(tmp_path: Path) -> None:
    available("triton")
    here = fingerprint("cuda")
    other = replace(here, arch="sm_80" if here.sm >= 90 else "sm_90")
    spec = kernel("gram.triton")
    code = compile_portable(spec, GRAM, spec.untuned(GRAM, other), other)
    with pytest.raises(RuntimeError, match="NO_BINARY_FOR_GPU|INVALID|failed"):
        load_portable(code, tmp_path / "none")

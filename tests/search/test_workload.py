"""The products of a model's groups and their order."""

from __future__ import annotations

from dataclasses import replace

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, kernels, ops
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, chain, end_for
from dmuon_tune.search.workload import ends, served_forms
from dmuon_tune.search.workload import workload as workload_of

WIDE = Group(2, 64, 256)
SQUARE = Group(1, 64, 64)
CPU = fingerprint("cpu")
H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150_000_000_000)


def workload(groups: list[Group], dtype: str) -> dict[Problem, int]:
    return workload_of(groups, dtype, kernels(), CPU)


def test_weights_are_launches_times_flops_most_expensive_first() -> None:
    weights = workload([WIDE], "float16")
    assert list(weights.values()) == sorted(weights.values(), reverse=True)
    assert weights.keys() == chain(WIDE, "gram", "float16").keys()  # far from square: no plain form
    for problem, launches in chain(WIDE, "gram", "float16").items():
        assert weights[problem] == launches * ops()[problem.op].flops(problem)


def test_groups_that_share_a_product_add_up_and_forms_do_not() -> None:
    once, twice = workload([SQUARE], "float32"), workload([SQUARE, SQUARE], "float32")
    assert {problem: 2 * weight for problem, weight in once.items()} == twice
    gram = Problem("gram", 1, 64, 64, 64, "float32", "float32")
    launches = {form: chain(SQUARE, form, "float32")[gram] for form in ("plain", "gram")}
    assert launches["plain"] > launches["gram"]
    assert once[gram] == launches["plain"] * 64**3


def test_the_order_does_not_depend_on_the_groups_order() -> None:
    assert list(workload([WIDE, SQUARE], "float16")) == list(workload([SQUARE, WIDE], "float16"))


def test_the_small_form_is_for_kernels_that_run_it_whole() -> None:
    """The library's kernel, a launch of many, serves it too; a GPU's own kernel refuses a CPU and long rows of it."""
    whole = [spec for spec in kernels("polar_small") if spec.name != "polar_small.library"]
    small = Group(64, 64, 64)
    assert served_forms(small, "float16", [*whole, kernel("polar_small.library")], H200) == ("gram", "plain", "small")
    assert served_forms(small, "float16", [kernel("polar_small.library")], H200) == ("gram", "plain")
    assert served_forms(small, "float32", whole, H200) == ("gram", "plain")
    assert served_forms(Group(1, 8192, 8192), "float16", whole, H200) == ("gram", "plain")
    assert served_forms(small, "float16", whole, CPU) == ("gram", "plain")


def test_the_span_form_is_for_kernels_that_run_every_span_and_no_fp32() -> None:
    library = kernel("gram_span.library")
    own = replace(library, variant="own")
    products = [kernel(f"{op}.library") for op in ("gram", "gemm_symmetric", "apply")]
    wide = Group(1, 64, 256)
    assert served_forms(wide, "float16", [*products, own, library], H200) == ("gram", "span")
    assert served_forms(wide, "float16", [*products, library], H200) == ("gram",)
    assert served_forms(wide, "float32", [*products, own, library], CPU) == ("gram",)
    two_steps = replace(own, refusal=lambda problem, device: None if problem.epilogue == "s2" else "two steps alone")
    assert served_forms(wide, "float16", [*products, two_steps], CPU) == ("gram",)


def test_on_a_gpu_a_step_begins_and_ends_in_the_weights_dtype() -> None:
    found = ends([Group(1, 1024, 1280)], "float16", kernels(), H200)
    products = chain(Group(1, 1024, 1280), "plain", "float16") | chain(Group(1, 1024, 1280), "gram", "float16")
    described = {
        (end.op, end.epilogue, end.dtype, end.out_dtype, like and like.epilogue) for end, like in found.items()
    }
    assert described == {
        ("momentum", "n", "bfloat16", "float16", None),
        ("apply", "w", "float16", "bfloat16", "c"),  # of both forms: the later one's product is the one it is like
        ("apply", "none", "float16", "bfloat16", "none"),
        ("apply", "c", "float16", "bfloat16", "c"),
        ("gemm_symmetric", "ci", "float16", "float16", "c"),
    }
    assert not found.keys() & products.keys() and set(found.values()) - {None} <= products.keys()
    assert not any(end.epilogue == "w" for end in ends([Group(3, 33, 35)], "float16", kernels(), H200))


def test_ends_of_other_weights_come_besides_those_that_chains_are_timed_with() -> None:
    group = Group(4, 256, 1536)
    usual = ends([group], "float16", kernels(), H200)
    both = ends([group], "float16", kernels(), H200, "float32")
    added = both.keys() - usual.keys()
    assert usual.items() <= both.items() and {(end.op, end.epilogue, end.dtype, end.out_dtype) for end in added} == {
        ("momentum", "n", "float32", "float16"), ("apply", "w", "float16", "float32"),
        ("apply", "none", "float16", "float32"),
    }
    assert all(both[end] == usual[end_for(end, "bfloat16")] for end in added)
    like_the_chain = ends([group], "float16", kernels(), H200, "float16")
    assert not like_the_chain.keys() & chain(group, "gram", "float16").keys()


def test_ends_are_for_gpus_and_kernels_that_serve_them() -> None:
    assert ends([WIDE, SQUARE], "float32", kernels(), CPU) == {}
    only_library = [spec for spec in kernels() if spec.backend == "library"]
    assert {end.op for end in ends([SQUARE], "float16", only_library, H200)} == {"gemm_symmetric"}
    small = ends([Group(64, 64, 64)], "float16", kernels(), H200)
    assert any(end.op == "polar_small" and end.out_dtype == "bfloat16" for end in small)

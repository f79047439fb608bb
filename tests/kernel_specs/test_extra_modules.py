"""Kernels named in DMUON_TUNE_KERNEL_MODULES: a good one is found, a bad one gets one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmuon_tune import kernel_specs
from dmuon_tune.errors import UsageError

Extra = Callable[..., list[str]]

GOOD = (
    "import dataclasses\n"
    "from dmuon_tune.kernel_specs.gram_library import KERNEL as own\n"
    "KERNEL = dataclasses.replace(own, variant='mine')\n"
)
OWN_OP = "import dataclasses\nfrom dmuon_tune.kernel_specs.gram import OP as own\n"


@pytest.fixture
def extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Extra]:
    """Writes the codes as modules, names them in the variable, and gives the names of all kernels then."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written: list[str] = []

    def use(*codes: str) -> list[str]:
        for code in codes:
            written.append(f"extra_{abs(hash(request.node.name))}_{len(written)}")
            (tmp_path / f"{written[-1]}.py").write_text(code)
        monkeypatch.setenv(kernel_specs.EXTRA_MODULES_VARIABLE, ",".join(written))
        kernel_specs._modules.cache_clear()
        return [spec.name for spec in kernel_specs.kernels()]

    yield use
    kernel_specs._modules.cache_clear()


def test_a_good_module_is_found(extra: Extra) -> None:
    own = {spec.name for spec in kernel_specs.kernels()}
    assert set(extra(GOOD)) - own == {"gram.library.mine"}


def test_names_may_be_repeated_spaced_and_built_in(monkeypatch: pytest.MonkeyPatch, extra: Extra) -> None:
    own = extra()
    name = "dmuon_tune.kernel_specs.gram_library"
    monkeypatch.setenv(kernel_specs.EXTRA_MODULES_VARIABLE, f" {name}, ,{name}")
    kernel_specs._modules.cache_clear()
    assert [spec.name for spec in kernel_specs.kernels()] == own


def test_a_new_op_and_a_kernel_of_it_may_come_together(extra: Extra) -> None:
    op = OWN_OP + "OP = dataclasses.replace(own, name='cube')\n"
    assert "cube.library.mine" in extra(GOOD.replace("variant=", "op='cube', variant="), op)


def kernel_with(fields: str) -> str:
    return GOOD.replace("variant='mine'", f"variant='mine', {fields}")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(9)\n", "cannot be imported: SystemExit: 9"),
        ("raise ValueError('a\\nb')\n", "cannot be imported: ValueError: a b"),
        ("def broken(:\n", "cannot be imported: SyntaxError: invalid syntax"),
        ("import nothere\n", "cannot be imported: No module named 'nothere'"),
        ("x = 1\n", "has neither KERNEL nor OP"),
        ("KERNEL = 3\n", "KERNEL must be KernelSpec, not int"),
        ("KERNEL = None\n", "KERNEL must be KernelSpec, not NoneType"),
        ("OP = 'gram'\n", "OP must be OpSpec, not str"),
        (kernel_with("op='nosuch'"), "KERNEL is of the unknown op 'nosuch'; there are: apply, gemm_symmetric, gram"),
        (kernel_with("op=3"), "KERNEL: op must be a string, not int"),
        (kernel_with("build=None"), "KERNEL: build must be callable, not NoneType"),
        (kernel_with("heuristic=3"), "KERNEL: heuristic must be callable, not int"),
        (kernel_with("Config=int"), "KERNEL: Config must be a dataclass"),
        (kernel_with("sources='one'"), "KERNEL: sources must be a tuple of module names"),
        (kernel_with("sources=('no_such_source',)"), "KERNEL: sources .* kernel source no_such_source not found"),
        (OWN_OP + "OP = dataclasses.replace(own, name='x', flops=2)\n", "OP: flops must be callable, not int"),
        (GOOD.replace("'mine'", "''"), "'gram.library', as that of module 'dmuon_tune.kernel_specs.gram_library' is"),
        (OWN_OP + "OP = own\n", "OP is named 'gram', as that of module 'dmuon_tune.kernel_specs.gram' is"),
    ],
)
def test_a_bad_module_gets_one_line(extra: Extra, code: str, said: str) -> None:
    with pytest.raises(UsageError, match=rf"^DMUON_TUNE_KERNEL_MODULES: module 'extra_\d+_0'.*{said}") as caught:
        extra(code)
    assert "\n" not in str(caught.value)


def test_two_modules_with_one_kernels_name_are_both_named(extra: Extra) -> None:
    with pytest.raises(UsageError, match=r"module 'extra_\d+_0': .*as that of module 'extra_\d+_1' is"):
        extra(GOOD, GOOD)


def test_an_absent_module_is_named_and_an_interrupt_passes_through(
    extra: Extra, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        extra("raise KeyboardInterrupt\n")
    monkeypatch.setenv(kernel_specs.EXTRA_MODULES_VARIABLE, "no.such_module")
    with pytest.raises(UsageError, match="module 'no.such_module' cannot be imported: No module named 'no'"):
        kernel_specs.kernels()

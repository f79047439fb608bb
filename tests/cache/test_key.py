"""Keys: a change in any part is another key, whatever is no part changes none, JSON keeps all."""

from __future__ import annotations

import ast
import json
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dmuon_tune.cache import TuningKey
from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.problem import DTYPES, EPILOGUES, LAYOUTS, MAX_DIM, Problem
from dmuon_tune.spec import KernelSpec, code_text, never_illegal

names = st.text(min_size=1, max_size=8)
extents = st.integers(1, MAX_DIM)
sizes = st.integers(0, 2**40)

PROBLEM_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "op": names,
    **dict.fromkeys(("batch", "m", "n", "k"), extents),
    **dict.fromkeys(("dtype", "out_dtype"), st.sampled_from(DTYPES)),
    "layout": st.sampled_from(LAYOUTS),
    "epilogue": st.sampled_from(EPILOGUES),
}
DEVICE_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "name": names,
    "arch": names,
    **dict.fromkeys(("sm_count", "smem_per_block_bytes", "l2_bytes", "memory_bytes"), sizes),
}
versions = st.dictionaries(names, names, max_size=3).map(lambda found: tuple(sorted(found.items())))
toolchains = st.builds(Toolchain, names, versions)
KEY_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "problem": st.builds(Problem, **PROBLEM_FIELDS),
    "kernel": names,
    "spec_digest": names,
    "device": st.builds(DeviceFingerprint, **DEVICE_FIELDS),
    "toolchain": toolchains,
    "validation": st.just("") | names,
}
keys = st.builds(TuningKey, **KEY_FIELDS)


def test_the_strategies_cover_every_field() -> None:
    assert [field.name for field in fields(TuningKey)] == list(KEY_FIELDS)
    assert {field.name for field in fields(Problem)} == set(PROBLEM_FIELDS)
    assert {field.name for field in fields(DeviceFingerprint)} == set(DEVICE_FIELDS)


@given(keys, st.data())
def test_any_changed_field_is_another_key(key: TuningKey, data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(list(KEY_FIELDS)))
    if part in ("problem", "device"):
        of_part = PROBLEM_FIELDS if part == "problem" else DEVICE_FIELDS
        name = data.draw(st.sampled_from([name for name in of_part if (part, name) != ("device", "name")]))
        changed = replace(key, **{part: replace(getattr(key, part), **{name: data.draw(of_part[name])})})
    else:
        changed = replace(key, **{part: data.draw(KEY_FIELDS[part])})
    assume(changed != key)
    assert changed.sha256 != key.sha256
    assert changed.canonical_json() != key.canonical_json()


@given(keys, names)
def test_another_product_name_is_the_same_key(key: TuningKey, name: str) -> None:
    renamed = replace(key, device=replace(key.device, name=name))
    assert (renamed, renamed.sha256, renamed.canonical_json()) == (key, key.sha256, key.canonical_json())


@given(keys)
def test_json_keeps_every_field(key: TuningKey) -> None:
    back = TuningKey.from_dict(json.loads(json.dumps(key.to_dict())))
    assert back == key and back.device.name == key.device.name and back.sha256 == key.sha256


def test_the_hash_is_stable_across_versions_of_this_program(key: TuningKey) -> None:
    expected = "c990f365eb1a0f21afa151c50b280c0d1d4c79fc3ebd823c49d817a6dad5a8e8"
    assert key.sha256 == expected, "a changed hash turns every shipped cache into misses"


SOURCES = sorted((Path(__file__).resolve().parents[2] / "kernel_specs").glob("*.py"))
SAMPLE = r'''
"""What the module does."""

import math  # for pi


class Config:
    """A class."""

    # the tile
    tile: int = 128
    code = """
        mov.u32 a, b;  # not a comment

        ret;
    """


@decorated(
    "a string on a line of its own",
    """and one of several
    lines"""
)
def build(problem, config="it's # no comment"):
    'Docstring.'
    x = "one" \
        "two"
    f"{call(x)}"
    return {"a": r"\d"}[x]
'''


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("# for pi", "# for the circle's number"), ("What the module does", "What it\n\ndoes"), ("A class.", "None"),
        ("    # the tile\n", ""), ("Docstring.", "Another one."), ("\n\n\nclass", "\n\nclass"),
        ("    tile: int = 128\n", "    tile: int = 128   \n\n"),
    ],
)
def test_comments_docstrings_and_blank_lines_are_no_code(then: str, now: str) -> None:
    assert SAMPLE.count(then) == 1
    ast.parse(SAMPLE.replace(then, now))
    assert code_text(SAMPLE.replace(then, now)) == code_text(SAMPLE)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("128", "64"), ("mov.u32 a, b;", "mov.u32 b, a;"), ("# not a comment", "# none"), ("b;  # not", "b; # not"),
        ("a string on a line of its own", "another string"), ("lines", "rows"), ("# no comment", "# none"),
        ("call(x)", "call(1)"),
        ('"two"', '"three"'), ("math", "cmath"), ("        ret;", "    ret;"),
        ("    return", "\n    if x:\n        return"), ("\n\n        ret", "\n        ret"),
    ],
)
def test_everything_else_is(then: str, now: str) -> None:
    assert SAMPLE.count(then) == 1
    ast.parse(SAMPLE.replace(then, now))
    assert code_text(SAMPLE.replace(then, now)) != code_text(SAMPLE)


def code_by_the_parser(source: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if isinstance(body[0], ast.Expr) and isinstance(getattr(body[0].value, "value", None), str):
                node.body = body[1:] or [ast.Pass()]
    return ast.dump(tree)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_an_edit_that_changes_a_kernels_code_changes_its_text(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from(SOURCES)).read_text(encoding="utf-8")
    at = data.draw(st.integers(0, len(source)))
    new = data.draw(st.sampled_from("ab01\"'#\\\n ()[]{}:,.+-*"))
    edited = source[:at] + new + source[at + data.draw(st.integers(0, 1)) :]
    try:
        changed = code_by_the_parser(edited) != code_by_the_parser(source)
    except (SyntaxError, ValueError):
        assume(False)
    assert not changed or code_text(edited) != code_text(source)


def test_an_unrelated_file_changes_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("digest_test_own", "digest_test_other"):
        (tmp_path / f"{name}.py").write_text("TILE = 128\n")

    def digest() -> str:
        return KernelSpec("gram", "any", Problem, never_illegal, never_illegal, ("digest_test_own",)).digest()

    before = digest()
    (tmp_path / "digest_test_other.py").write_text("TILE = 64\n")
    assert digest() == before
    (tmp_path / "digest_test_own.py").write_text("TILE = 64\n")
    assert digest() != before

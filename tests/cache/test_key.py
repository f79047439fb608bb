"""TuningKey: a change in any part is another key, the device's name is none, JSON keeps all."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from dmuon_tune.cache import TuningKey
from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.problem import DTYPES, EPILOGUES, LAYOUTS, MAX_DIM, Problem

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

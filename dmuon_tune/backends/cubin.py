"""Reads what a compiled GPU kernel needs from its cubin, without any CUDA tool."""

from __future__ import annotations

import struct
from collections.abc import Iterator

# Entries of a cubin's .nv.info sections: CUDA's EIATTR_REGCOUNT, EIATTR_FRAME_SIZE and EIATTR_KPARAM_INFO, value format
# "sized".
_SIZED, _REGISTER_COUNT, _FRAME_BYTES, _PARAMETER = 0x04, 0x2F, 0x11, 0x17
_PARAMETER_SIZE_SHIFT = 18  # a parameter's size is the upper bits of its entry's last word
_NOTES = ".nv.info"


def cubin_resources(cubin: bytes) -> dict[str, int]:
    """``registers`` a thread and ``spill_bytes`` (stack frame) of a cubin's largest kernel, read from its ELF notes."""
    found = {"registers": 0, "spill_bytes": 0}
    for name, begin, end in _sections(cubin):
        if name != _NOTES:
            continue
        for attribute, at in _notes(cubin, begin, end):
            field = {_REGISTER_COUNT: "registers", _FRAME_BYTES: "spill_bytes"}.get(attribute)
            if field:
                found[field] = max(found[field], struct.unpack_from("<II", cubin, at)[1])
    return found


def cubin_parameters(cubin: bytes) -> dict[str, tuple[int, ...]]:
    """Each kernel's name and the sizes of its parameters in order, bytes."""
    kernels = {}
    for name, begin, end in _sections(cubin):
        if not name.startswith(f"{_NOTES}."):
            continue
        sizes = {}
        for attribute, at in _notes(cubin, begin, end):
            if attribute == _PARAMETER:
                _, place, _, packed = struct.unpack_from("<IHHI", cubin, at)
                sizes[place] = packed >> _PARAMETER_SIZE_SHIFT
        kernels[name.removeprefix(f"{_NOTES}.")] = tuple(sizes[place] for place in sorted(sizes))
    return kernels


def _sections(cubin: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, first byte, end) of each section."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names = sections[names_index][4]
    for section in sections:
        start = names + section[0]
        yield cubin[start : cubin.index(b"\0", start)].decode(), section[4], section[4] + section[5]


def _notes(cubin: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    """(attribute, where its value begins) of a section's entries that have a sized value."""
    while at < end:
        value_format, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if value_format == _SIZED:
            yield attribute, at
            at += size

"""Reads what a compiled GPU kernel needs from its cubin, without any CUDA tool."""

from __future__ import annotations

import struct

# Entries of a cubin's .nv.info section: CUDA's EIATTR_REGCOUNT and EIATTR_FRAME_SIZE, value format "sized".
_SIZED, _REGISTER_COUNT, _FRAME_BYTES = 0x04, 0x2F, 0x11


def cubin_resources(cubin: bytes) -> dict[str, int]:
    """``registers`` a thread and ``spill_bytes`` (stack frame) of a cubin's largest kernel, read from its ELF notes."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names = sections[names_index][4]
    found = {"registers": 0, "spill_bytes": 0}
    for section in sections:
        start = names + section[0]
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        at, end = section[4], section[4] + section[5]
        while at < end:
            value_format, attribute, size = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if value_format != _SIZED:
                continue
            field = {_REGISTER_COUNT: "registers", _FRAME_BYTES: "spill_bytes"}.get(attribute)
            if field:
                found[field] = max(found[field], struct.unpack_from("<II", cubin, at)[1])
            at += size
    return found

"""Device memory that captured graphs rely on: small tensors of host values, work buffers, and the order of streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


def capturing(device: torch.device) -> bool:
    """Whether the caller captures a CUDA graph of its own."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Static:
    """A tensor at a fixed address that holds host values and is rewritten only where they changed, without waiting.

    With ``in_capture``, of the caller's, each use writes a tensor of its own: a graph must not rely on what later calls
    change.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, columns: int = 0, in_capture: bool = False) -> None:
        self._device, self._dtype, self._columns, self._in_capture = device, dtype, columns, in_capture
        self._values: Sequence[float] | None = None
        self._tensor: Tensor | None = None

    def holding(self, values: Sequence[float]) -> Tensor:
        """The tensor, (len,) or (len / columns, columns), with these values; a range is written by one launch."""
        if self._in_capture:
            return _written(self._empty(len(values)), values, in_capture=True)
        if self._tensor is None or self._values is None or len(self._values) != len(values):
            self._tensor, self._values = self._empty(len(values)), None
        if values != self._values:
            _written(self._tensor, values, in_capture=False)
            self._values = values
        return self._tensor

    def _empty(self, count: int) -> Tensor:
        shape = (count // self._columns, self._columns) if self._columns else (count,)
        return _lasting(shape, self._dtype, self._device)


class Constant:
    """float32 host values in device memory that nothing writes again, so that graphs of the caller's may rely on it.

    Only a capture that comes before any other use writes a tensor of its own.
    """

    def __init__(self, device: torch.device, rows: Sequence[tuple[float, ...]]) -> None:
        self._device, self._rows = device, tuple(rows)
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        """(rows, columns)."""
        if self._tensor is not None:
            return self._tensor
        if capturing(self._device) and (self._device, self._rows) not in _kept:
            values = [value for row in self._rows for value in row]
            shape = len(self._rows), len(self._rows[0])
            return _written(_lasting(shape, torch.float32, self._device), values, in_capture=True)
        if (self._device, self._rows) not in _kept:
            with torch.inference_mode(False):
                _kept[self._device, self._rows] = torch.tensor(self._rows, dtype=torch.float32, device=self._device)
        self._tensor = _kept[self._device, self._rows]
        return self._tensor


# Never freed: a graph of the caller's may outlive all else that holds one. Some sixty bytes for each set and device.
_kept: dict[tuple[torch.device, tuple[tuple[float, ...], ...]], Tensor] = {}


def _lasting(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor for all later calls too: one made in inference mode could not be written outside of it."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _written(tensor: Tensor, values: Sequence[float], in_capture: bool) -> Tensor:
    if isinstance(values, range):
        torch.arange(values.start, values.stop, values.step, dtype=tensor.dtype, out=tensor)
    elif in_capture:  # a copy from host memory cannot be captured, a kernel's argument can
        for place, value in zip(tensor.view(-1).unbind(), values, strict=True):
            place.fill_(value)
    else:  # from pageable memory: the driver has taken the values when the call returns
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape), non_blocking=True)
    return tensor


class Workspace:
    """Work buffers on one device that all groups share; each grows to the largest of them.

    ``version`` changes when a buffer moves: graphs that were captured before it are then void.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.version = 0
        self._buffers: dict[tuple[torch.dtype, str], Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._capture_stream: torch.cuda.Stream | None = None

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, zeros: bool = False) -> Tensor:
        """A contiguous view of this shape of the buffer of this name; ``zeros`` are zeroed once, and left so by users.
        """
        size = math.prod(shape)
        held = self._buffers.get((dtype, name))
        if held is None or held.numel() < size:
            held = self._buffers[dtype, name] = _lasting(size, dtype, self.device)
            self.version += 1
            if zeros:
                held.zero_()
        return held[:size].view(shape)

    def follow(self) -> None:
        """Let the current stream wait for the one that used the buffers before it."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)
        self._stream = current

    @cached_property
    def pool(self) -> Any:
        """Memory that all graphs share for what lives only while one runs: they run one after another."""
        return torch.cuda.graph_pool_handle()

    @property
    def capture_stream(self) -> torch.cuda.Stream:
        """The one stream that captures run on: the vendor library keeps a workspace for each."""
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._capture_stream

"""Copies beside the chains: on a GPU on a stream of their own, on a CPU in the caller's order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | None  # a place in a stream; None on a CPU


class Beside:
    """A second stream of ``device``; see :meth:`joined`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def stream(self, after: Mark = None) -> Iterator[None]:
        """What is launched inside runs on the second stream, ``after`` that place of another."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self.wait(after)
            yield

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The second stream begins behind what the caller has launched before, and what comes later waits for it."""
        with self.stream(self.mark()):
            pass
        yield
        self.join()

    def join(self) -> None:
        """What comes later waits for the second stream."""
        with self.stream():
            last = self.mark()
        self.wait(last)

    def mark(self) -> Mark:
        """Where the current stream is."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, place: Mark) -> None:
        """Let the current stream wait for a place of another."""
        if place is not None:
            place.wait(torch.cuda.current_stream(self._device))

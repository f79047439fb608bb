"""Checks what was measured or compiled elsewhere once on this device, before training first uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any

import torch

from dmuon_tune.cache import Layers
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import said
from dmuon_tune.kernel_specs import ops
from dmuon_tune.measure.verify import verify
from dmuon_tune.problem import Problem

SEED = 0

logger = getLogger("dmuon_tune.runtime")


class Revalidation:
    """What :mod:`dmuon_tune.measure.verify` asks of every result, asked of a compiled kernel on the current device."""

    def __init__(self, layers: Layers, device: DeviceFingerprint) -> None:
        self._layers, self._device = layers, device
        self._has_memory = False

    def failure(
        self, problem: Problem, key_sha256: str, config: Mapping[str, Any], launch: Callable[..., Any], code: str = ""
    ) -> str | None:
        """Why this kernel must not run here; None where it was measured here or passes, which is remembered.

        ``code``: the :attr:`dmuon_tune.cache.Artefact.code` that was loaded, empty where it was compiled here. What was
        measured says nothing of code that was loaded, which may be of anything.
        """
        if not code and self._layers.was_measured_here(key_sha256, config):
            return None
        if self._layers.checked.has(key_sha256, config, code):
            return None
        if self._device.kind == "cuda" and torch.cuda.is_current_stream_capturing():
            return "it cannot be checked while a graph is captured; call once before"
        try:
            with torch.no_grad():
                failure = verify(launch, ops()[problem.op], problem, self._device.kind, SEED).failure
        except Exception as error:  # a kernel may raise anything, and memory may be short in a job that trains
            failure = said(error)
        self._has_memory = self._device.kind == "cuda"
        if not failure:
            self._layers.checked.add(key_sha256, config, code)
        return failure or None

    def release(self) -> None:
        """Give the device what the checks' tensors took: one check reuses another's, training has no use for it."""
        if self._has_memory:
            torch.cuda.empty_cache()
            self._has_memory = False

"""What many look-ups of kernels share: the caches, opened once, and a resolver a device for the chains' ends."""

from __future__ import annotations

import torch

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Layers

from .resolve import Resolver


class LookUps:
    """``layers`` are the caches given, or else this machine's, opened at the first look-up; ``close()`` closes those.

    What a resolver has read, loaded and checked for one group it does not again for the next.
    """

    def __init__(self, layers: Layers | None) -> None:
        self._given = layers
        self._opened: Layers | None = None
        self._resolvers: dict[torch.device, Resolver] = {}

    @property
    def layers(self) -> Layers:
        if self._given is not None:
            return self._given
        if self._opened is None:
            self._opened = Layers.open()
        return self._opened

    def resolver(self, device: torch.device) -> Resolver:
        """What binds the ends of chains on a device."""
        if device not in self._resolvers:
            # The ends on a CPU are PyTorch's: nothing is looked up.
            layers = Layers({}) if device.type == "cpu" and self._given is None else self.layers
            self._resolvers[device] = Resolver(fingerprint(str(device)), layers, use_nearest=False)
        return self._resolvers[device]

    def close(self) -> None:
        for resolver in self._resolvers.values():
            resolver.release()
        if self._opened is not None:
            self._opened.close()

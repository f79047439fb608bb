"""``random``: every unseen configuration is as likely; what other samplers are held against."""

from __future__ import annotations

from . import Ints, Sampler


class RandomSampler(Sampler):
    name = "random"
    summary = "uniformly random"

    def choose(self, unseen: Ints) -> int:
        return int(self.rng.choice(unseen))


SAMPLER = RandomSampler

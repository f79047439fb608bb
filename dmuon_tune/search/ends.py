"""Searches what a step launches at a chain's ends, from what was found for the products that it stands for."""

from __future__ import annotations

from dmuon_tune.problem import Problem

from .schedule import Candidate, KernelSearch, ProblemSearch

FEWER_TRIALS = 4  # times fewer than a product's: the search starts near its best


class EndSearch(ProblemSearch):
    """One end's search; ``like`` is that of the product that it stands for, None where there is none.

    Its fastest configuration that runs here comes first, and again whenever another becomes the fastest, so that what
    is measured of an end is no worse than what it would take over unmeasured. Untuned configurations follow, as far as
    the trials go.
    """

    is_end = True

    def __init__(
        self, problem: Problem, kernel_searches: list[KernelSearch], trials: int, like: ProblemSearch | None
    ) -> None:
        super().__init__(problem, kernel_searches, -(-trials // FEWER_TRIALS))
        self._like = like

    @property
    def planned(self) -> int:
        """How many configurations a run without a budget measures."""
        legal = self.reused + sum(each.sampler.unseen for each in self.kernels)
        return max(0, min(self._trials, legal) - self.reused)

    def seeds(self) -> list[Candidate]:
        """None: an end never goes before a product."""
        return []

    def propose(self) -> Candidate | None:
        """The product's best, an untuned configuration, or what the samplers suggest."""
        if self._proposed >= self._trials:
            return None
        candidate = self._inherited() or self._untuned()
        if candidate is None:
            return super().propose()
        self._proposed += 1
        return candidate

    def _inherited(self) -> Candidate | None:
        """The fastest configuration of ``like`` that is legal here, if it was not proposed yet."""
        own = {each.spec.name: each for each in self.kernels}
        for name, config in self._like.fastest() if self._like else ():
            if name in own and own[name].is_legal(config):
                return Candidate(self, own[name], config) if own[name].sampler.reserve(config) else None
        return None

    def _untuned(self) -> Candidate | None:
        for each in self.kernels:
            if each.sampler.reserve(each.untuned):
                return Candidate(self, each, each.untuned)
        return None


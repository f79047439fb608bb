"""Tunes a model's products: measures candidates, keeps each result at once, and picks winners and recipes."""

from __future__ import annotations

from collections.abc import Sequence

from dmuon_tune.cache import Layers, Store
from dmuon_tune.recipe import Group, default_dtype
from dmuon_tune.spec import KernelSpec

from .kernel_search import check_backends, usable_kernels
from .options import ChainReport, ProblemReport, TuneOptions, TuneReport
from .plan import searches_of
from .problem_search import ProblemSearch
from .progress import Progress, Silent
from .recipes import CLOSE_OWN, ChainSearch, Tuned, close, estimates, keep_recipe, priced
from .run import Run
from .start import untuned_chain
from .workload import served_forms


def tune(
    groups: Sequence[Group], store: Store, options: TuneOptions, progress: Progress | None = None,
    layers: Layers | None = None,
) -> TuneReport:
    """Measure every product of these groups and keep the results, winners' recipes included, in ``store``.

    The search begins with what ``store``, and the ``layers`` where they are given, hold of the nearest shapes.
    A configuration that the store holds under the current key, however it ended, is not measured again. Raises
    UsageError for a device or backend that is not here, NoLegalConfigError where nothing can run a product, CacheError
    where a result cannot be kept or is gone at the end; KeyboardInterrupt passes through once the measuring processes
    are stopped.
    """
    try:
        return _tune(groups, store, options, progress or Silent(), layers)
    finally:
        store.require_kept()


def _tune(
    groups: Sequence[Group], store: Store, options: TuneOptions, progress: Progress, layers: Layers | None
) -> TuneReport:
    check_backends(options.backends)
    run = Run(store, options, progress)
    device = run.device
    dtype = options.dtype or default_dtype(device.kind)
    specs, unavailable = usable_kernels(device, options.backends)
    with run:
        searches = searches_of(groups, dtype, specs, device, store, options, layers)
        run.warm(searches)
        complete = run.measure(searches)
        unavailable |= run.broken
        specs = [spec for spec in specs if spec.backend not in run.broken]
        searches = [search for search in searches if search.kernels]
        run.race(searches)
        chain_searches = _chain_searches(groups, dtype, searches, specs, run)
        unfinished = run.time_chains(chain_searches)
    reports = [_report(search, run) for search in searches]
    recipes = [keep_recipe(search, specs, device, store) for search in chain_searches]
    return TuneReport(
        device,
        reports,
        recipes,
        run.measured,
        sum(report.reused for report in reports),
        unavailable,
        complete,
        run.contended,
        ChainReport(run.chains_timed, run.chains_reused, run.chains_failed, unfinished),
        run.raced,
    )


def _report(search: ProblemSearch, run: Run) -> ProblemReport:
    return ProblemReport(
        search.problem,
        search.winner(run.provenance),
        search.library(run.provenance),
        run.measured_of.get(search, 0),
        search.reused,
        search.statuses(),
        search.is_end,
    )


def _chain_searches(
    groups: Sequence[Group], dtype: str, searches: Sequence[ProblemSearch], specs: Sequence[KernelSpec], run: Run
) -> list[ChainSearch]:
    """A search for each group that has a form whose every product has a winner, in order."""
    tuned = {}
    for search in searches:
        best = search.winner(run.provenance)
        if best is not None:
            # Of ends the winners alone: they change nothing else in a chain.
            if search.is_end:
                tuned[search.problem] = Tuned(best)
                continue
            rivals = search.rivals(run.provenance, close(search.problem, run.device))
            tuned[search.problem] = Tuned(best, rivals, search.own_rival(run.provenance, CLOSE_OWN))
    found, prices = [], priced(groups)
    for group in dict.fromkeys(groups):
        estimated = estimates(group, served_forms(group, dtype, specs, run.device), dtype, tuned)
        if estimated:
            start = untuned_chain(group, dtype, specs, run.device)
            found.append(ChainSearch(estimated, tuned, specs, run.device, start, prices.get(group, ())))
    return found

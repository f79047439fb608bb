"""Draws how long each owner works, by several assignments of a model's matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dmuon_tune.words import counted

from .plots import INK, LINES, SERIES, Plot, _figure, _settings


def owners_plot(title: str, loads_us: Mapping[str, Sequence[float]], bound_us: float) -> Plot:
    """One line an assignment (by its name), its owners from the slowest on; ``bound_us``: what none can beat."""
    with _settings():
        figure, axes = _figure(7.6, 3.8)
        for index, (name, loads) in enumerate(loads_us.items()):
            slowest_first = sorted((us / 1000 for us in loads), reverse=True)
            axes.stairs(
                slowest_first, baseline=None, color=SERIES[index], linestyle=LINES[index], linewidth=1.6,
                label=f"{name}: {slowest_first[0]:.4g} ms",
            )
        axes.axhline(bound_us / 1000, color=INK, linewidth=1, label=f"bound: {bound_us / 1000:.4g} ms")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("owners, the slowest first")
        axes.set_ylabel("ms of the optimizer's step")
        figure.legend(loc="outside lower center", ncols=3)
        figure.suptitle(title)
    count = counted(len(next(iter(loads_us.values()))), "owner")
    names = ", ".join(loads_us)
    return Plot("owners", "owners", title, f"The times of {count}, the slowest first, by {names}.", figure)

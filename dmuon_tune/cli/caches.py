"""``dmuon-tune cache list``: the caches of this machine and what they hold; opens them for other commands too."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import CacheError

from . import bundles, cache_build, options, recheck
from .output import config_text, microseconds, print_json, say, table, warn

if TYPE_CHECKING:
    from dmuon_tune.cache import LayerDescription, Store


@dataclass(frozen=True)
class OpenCache:
    """One readable cache and its layer's label (``file`` or ``server`` for one named by ``--cache``)."""

    label: str
    path: str
    store: Store


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "cache", help="list, ship, merge and check caches",
        description="Look into the caches of this machine, and turn them into files that travel.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list", parents=[options.common(), options.cache()], help="list layers, entries and counts by status",
        description="List every cache in the order of precedence with its entries and its trials by status.",
    )
    listing.add_argument(
        "--layers", action="store_true", help="the layers, with those that do not exist, and where each entry came from"
    )
    listing.set_defaults(run=run)
    cache_build.register(actions)
    bundles.register(actions)
    recheck.register(actions)


def run(args: argparse.Namespace) -> int:
    layers = described(args.cache)
    _check(layers)
    if args.layers:
        _print_layers(layers, args.format)
    else:
        _print_contents(layers, args.format)
    return exit_code(layers)


def _check(layers: Sequence[LayerDescription]) -> None:
    """Look for damage that reading the entries alone does not meet; a damaged cache is unreadable from then on."""
    from dmuon_tune.cache import contents_of

    for layer in layers:
        if layer["state"] != "ok":
            continue
        try:
            with opened([layer]) as (cache,):
                cache.store.check()
                contents_of(cache.store)
        except CacheError as error:
            layer.update(state="unreadable", entries=0, detail=str(error))
            warn(str(error))


def _print_layers(layers: Sequence[LayerDescription], output: str) -> None:
    """The layers, then each entry of theirs: where it was measured, and which layer above hides it: training takes a
    problem's kernel from the first layer that has entries of it for the device."""
    with opened(layers) as caches:
        found = [(cache.label, entry) for cache in caches for entry in cache.store.entries()]
    first: dict[Any, str] = {}
    rows = []
    for label, entry in found:
        above = first.setdefault((entry.key.problem, entry.key.device), label)
        rows.append((label, entry, entry.provenance.get("imported"), above if above != label else None))
    if output == "json":
        print_json({"layers": layers, "entries": [
            {**entry_fields(entry), "layer": label, "imported": imported, "hidden_by": above}
            for label, entry, imported, above in rows
        ]})
        return
    say(table(["layer", "state", "entries", "path"], [
        [layer["label"], layer["state"], layer["entries"], layer["path"]] for layer in layers
    ]))
    if not rows:
        return
    say()
    say(table(["problem", "device", "kernel", "config", "median_us", "layer", "imported", "hidden_by"], [
        [
            entry.key.problem.label(), entry.key.device.name, entry.key.kernel, config_text(entry.config),
            microseconds(entry.measurement.median_us), label, imported, above,
        ]
        for label, entry, imported, above in rows
    ]))


def described(path: str | None) -> list[LayerDescription]:
    """Label, path, state and entry count of the file or server ``path`` alone (label ``file`` or ``server``), or of
    every layer."""
    from dmuon_tune.cache import LayerDescription, Layers, Store

    if path is None:
        with Layers.open() as layers:
            return layers.descriptions()
    with Store.open(path, read_only=True) as store:
        label, shown = ("server", store.where) if store.is_server else ("file", path)
        return [LayerDescription(path, label=label, path=shown, state="ok", entries=len(store.entries()), detail="")]


def known(place: str | None, may_be_new: bool) -> Store:
    """One cache to read, the file or server ``place`` or the user's. Where it does not exist, it is an empty one if it
    ``may_be_new``, else a CacheError."""
    from dmuon_tune.cache import Store, user_cache_path
    from dmuon_tune.cache.database import locate

    where = place or str(user_cache_path())
    file = locate(where)
    is_new = isinstance(file, Path) and not file.exists()
    return Store.open("sqlite://") if is_new and may_be_new else Store.open(where, read_only=True)


@contextmanager
def opened(layers: Sequence[LayerDescription]) -> Iterator[list[OpenCache]]:
    """Those of the described caches that can be read, in the same order."""
    from dmuon_tune.cache import Store

    caches = [
        OpenCache(layer["label"], layer["path"], Store.open(layer.location, read_only=True))
        for layer in layers
        if layer["state"] == "ok"
    ]
    try:
        yield caches
    finally:
        for cache in caches:
            cache.store.close()


@contextmanager
def stores(place: str | None) -> Iterator[list[Store]]:
    """The file or server ``place`` alone, empty where it is new, or all caches of this machine that can be read."""
    if place is None:
        with opened(described(None)) as caches:
            yield [cache.store for cache in caches]
    else:
        with known(place, may_be_new=True) as store:
            yield [store]


def exit_code(layers: Sequence[LayerDescription]) -> int:
    """The exit code where one of the described caches exists and cannot be read, else 0."""
    return CacheError.exit_code if any(layer["state"] == "unreadable" for layer in layers) else 0


def _print_contents(layers: Sequence[LayerDescription], output: str) -> None:
    with opened(layers) as caches:
        found = [(cache, cache.store.entries(), cache.store.counts(), cache.store.recipes()) for cache in caches]
    if output == "json":
        print_json({"caches": [
            {
                "layer": cache.label, "path": cache.path, "statuses": counts, "recipes": len(recipes),
                "entries": [entry_fields(entry) for entry in entries],
            }
            for cache, entries, counts, recipes in found
        ]})
        return
    if not found and not exit_code(layers):
        warn("no cache yet; 'dmuon-tune tune --preset tiny' makes one")
    rows = [
        [cache.label, len(entries), len(recipes), sum(counts.values()), statuses_text(counts), cache.path]
        for cache, entries, counts, recipes in found
    ]
    say(table(["layer", "entries", "recipes", "trials", "statuses", "path"], rows))


def statuses_text(counts: dict[str, int]) -> str | None:
    """``ok 10 timeout 1``; None where nothing was tried."""
    return " ".join(f"{status} {count}" for status, count in counts.items() if count) or None


def entry_fields(entry: Any) -> dict[str, Any]:
    """A cache entry as JSON types: its key's parts, configuration and times."""
    measurement = entry.measurement
    return {
        "problem": entry.key.problem.to_dict(),
        "kernel": entry.key.kernel,
        "config": entry.config,
        "median_us": measurement.median_us,
        "p20_us": measurement.p20_us,
        "p80_us": measurement.p80_us,
        "max_rel_err": measurement.max_rel_err,
        "resources": measurement.resources,
        "validation": entry.validation,
        "spec_digest": entry.key.spec_digest,
        "device": entry.key.device.to_dict(),
        "toolchain": entry.key.toolchain.to_dict(),
        "provenance": entry.provenance,
        "key": entry.key.sha256,
    }

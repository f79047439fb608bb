"""``dmuon-tune cache export``, ``import``, ``merge``, ``diff`` and ``prune``: caches as files that travel."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import CacheError, UsageError

from . import options
from .output import note, print_json, say, table, warn

if TYPE_CHECKING:
    from dmuon_tune.cache import Artefact, ArtefactStore, Conflict, Contents, Trial

BUNDLE_OR_CACHE = "a bundle, a cache file, a server's URL or a package's cache, such as starter-h200"


@dataclass(frozen=True)
class Source:
    """What one bundle, cache file or server holds."""

    where: str
    contents: Contents
    artefacts: ArtefactStore
    is_bundle: bool

    @cached_property
    def foreign(self) -> frozenset[str]:
        """The artefacts of its folder that only other caches beside that folder hold."""
        if self.is_bundle:
            return frozenset()
        return _of_neighbours(self.artefacts, self.where) - self.contents.artefact_ids

    @property
    def compiled(self) -> list[tuple[ArtefactStore, Artefact]]:
        """Every artefact but the foreign ones, with the folder it lies in."""
        return [(self.artefacts, artefact) for artefact in self.artefacts.all() if artefact.id not in self.foreign]


def register(actions: Any) -> None:
    common, cache = options.common(), options.cache()
    export = actions.add_parser(
        "export", parents=[common, cache], help="write a cache as one file to ship",
        description="Write the user's cache, or --cache, with its compiled kernels as one bundle, a tar file. Equal "
        "contents give equal bytes on every machine.",
    )
    export.add_argument("bundle", type=options.place, metavar="FILE", help="the bundle to write")
    export.add_argument(
        "--only", choices=("winners",), help="leave out what training does not read: losers, failures, timed chains"
    )
    export.set_defaults(run=_export)
    taking = actions.add_parser(
        "import", parents=[common, cache], help="take a bundle's results into a cache",
        description="Take what a bundle holds into the user's cache, or --cache: what is new or better. Training "
        "checks each of these results once on its device before it uses it.",
    )
    taking.add_argument("bundle", type=options.place, metavar="FILE", help=BUNDLE_OR_CACHE)
    taking.set_defaults(run=_import)
    merge = actions.add_parser(
        "merge", parents=[common], help="make one bundle of several, and list where they differ",
        description="Write the union of bundles and caches as one bundle. The better result of a configuration stays, "
        "and where the others differ is listed.",
    )
    merge.add_argument("sources", type=options.place, metavar="SOURCE", nargs="+", help=BUNDLE_OR_CACHE)
    merge.add_argument("--out", type=options.place, metavar="FILE", required=True, help="the bundle to write")
    merge.set_defaults(run=_merge)
    diff = actions.add_parser(
        "diff", parents=[common], help="say where two caches differ",
        description="List the winners, outcomes and recipes that differ, or that one of the two has alone.",
    )
    diff.add_argument("first", type=options.place, metavar="FIRST", help=BUNDLE_OR_CACHE)
    diff.add_argument("second", type=options.place, metavar="SECOND", help="the same")
    diff.set_defaults(run=_diff)
    prune = actions.add_parser(
        "prune", parents=[common, cache], help="delete results that no longer serve",
        description="Delete results from the user's cache, or --cache, with their compiled kernels and the recipes and "
        "chains made of them, and what killed processes left among the compiled kernels.",
    )
    prune.add_argument("--stale", action="store_true", help="those of other code, toolchains or checks than here")
    prune.add_argument("--failures", action="store_true", help="those that are not ok: a later run tries them again")
    prune.add_argument("--losers", action="store_true", help="those that neither win their key nor are in a recipe")
    prune.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    prune.set_defaults(run=_prune)


@contextmanager
def opened_source(place: str | None, is_given: bool = False) -> Iterator[Source]:
    """What a bundle, file or URL holds (None: the user's cache); CacheError where it is damaged or not there.
    ``is_given``: it came from elsewhere, so that tuning would not make it."""
    from dmuon_tune.cache import ArtefactStore, Store, contents_of, is_bundle, opened_bundle, user_cache_path

    where = str(user_cache_path()) if place is None else place
    if is_given and "://" not in where and not os.path.exists(where):
        where = _packaged(where)
    with ExitStack() as stack:
        if "://" not in where and is_bundle(where):
            bundle = stack.enter_context(opened_bundle(where))
            database, artefacts = str(bundle.database), bundle.artefacts
        else:
            database, artefacts = where, ArtefactStore.beside(where)
        with _told_as(database, where):  # what is done with the source says its own errors
            store = stack.enter_context(Store.open(database, read_only=True, shipped=database != where))
            store.check()
            contents = contents_of(store)
        yield Source(where if database != where else store.where, contents, artefacts, database != where)


def _packaged(name: str) -> str:
    from dmuon_tune.cache import packaged_cache

    try:
        path = packaged_cache(name)
    except Exception as error:  # whatever that package's code raises
        raise CacheError(f"the package that ships the cache {name} cannot say where it is: {error!r}") from error
    if path is None:
        raise CacheError(f"there is no {name}; name {BUNDLE_OR_CACHE}; 'dmuon-tune cache export' writes a bundle")
    return str(path)


@contextmanager
def _told_as(database: str, where: str) -> Iterator[None]:
    """What is wrong with a bundle's database is said of the bundle, not of the temporary file."""
    try:
        yield
    except CacheError as error:
        if database == where:
            raise
        said = str(error).replace(f"cache {database}", database)
        raise type(error)(said.replace(database, f"bundle {where}")) from error


def _export(args: argparse.Namespace) -> int:
    from dmuon_tune.cache import write_bundle

    with opened_source(args.cache) as source:
        contents = source.contents.only_winners() if args.only == "winners" else source.contents
        left_out = source.contents.artefact_ids - contents.artefact_ids
        artefacts = [pair for pair in source.compiled if pair[1].id not in left_out]
        write_bundle(args.bundle, contents, artefacts)
    _say_written(args, contents, artefacts, args.bundle)
    return 0


def _say_written(args: argparse.Namespace, contents: Contents, artefacts: list[Any], bundle: str) -> None:
    found = {**_counts(contents), "artefacts": _distinct(artefacts), "bytes": os.path.getsize(bundle), "bundle": bundle}
    if args.format == "json":
        print_json(found)
    else:
        say(table(list(found), [list(found.values())]))


def _distinct(artefacts: list[Any]) -> int:
    return len({artefact.id for _, artefact in artefacts})


def _counts(contents: Contents) -> dict[str, int]:
    return {
        "results": len(contents.results), "winners": len(contents.winners), "recipes": len(contents.recipes),
        "chains": len(contents.chains),
    }


def _import(args: argparse.Namespace) -> int:
    from dmuon_tune.cache import ArtefactStore, Store, gains, keep, take_artefacts

    taken: list[Contents] = []
    with opened_source(args.bundle, is_given=True) as source:
        _check_artefacts(source)
        artefacts = source.compiled
        arriving = source.contents.as_imported(os.path.basename(args.bundle) if "://" not in args.bundle else "server")

        def new_or_better(kept: Contents) -> Contents:
            taken.append(gains(kept, arriving))
            return taken[-1]

        with Store.open_user(args.cache) as store:
            keep(store, new_or_better)
            where = store.where
        ours = ArtefactStore.beside(args.cache or where)
        compiled = take_artefacts(ours, artefacts)
    found = {**_counts(taken[-1]), "artefacts": compiled, "unchanged": len(arriving.results) - len(taken[-1].results)}
    if args.format == "json":
        print_json({**found, "cache": where})
    else:
        say(table([*found, "cache"], [[*found.values(), where]]))
    return 0


def _check_artefacts(source: Source) -> None:
    """CacheError where one is not what its record and its file's name say: then nothing of the source is taken."""
    for wrong in source.artefacts.verify(leave_out=source.foreign):
        told = wrong
        if source.is_bundle:
            told = f"bundle {source.where} is damaged: {wrong.replace(f'{source.artefacts.folder.parent}{os.sep}', '')}"
        raise CacheError(f"{told}; nothing was taken; export it again, or copy it anew")


def _merge(args: argparse.Namespace) -> int:
    from dmuon_tune.cache import conflicts, merged, write_bundle

    with ExitStack() as stack:
        sources = [stack.enter_context(opened_source(place, True)) for place in args.sources]
        contents = [source.contents.as_shipped() for source in sources]
        union, found = merged(contents), conflicts(contents)
        artefacts = [pair for source in sources for pair in source.compiled]
        write_bundle(args.out, union, artefacts)
    if args.format == "json":
        counts = {**_counts(union), "artefacts": _distinct(artefacts), "bundle": args.out}
        print_json({**counts, "conflicts": [asdict(conflict) for conflict in found]})
        return 0
    _say_written(args, union, artefacts, args.out)
    if found:
        say()
        say(_conflict_table(found, "kept", "other"))
    return 0


def _diff(args: argparse.Namespace) -> int:
    from dmuon_tune.cache import differences

    with opened_source(args.first, True) as first, opened_source(args.second, True) as second:
        found = list(differences(first.contents, second.contents))
    if args.format == "json":
        print_json({"differences": [
            {"about": one.about, "device": one.device, "first": one.kept, "second": one.other} for one in found
        ]})
    elif found:
        say(_conflict_table(found, "first", "second"))
    else:
        note("no difference in winners, outcomes or recipes")
    return 0


def _conflict_table(found: list[Conflict], kept: str, other: str) -> str:
    rows = [[one.about, one.device, one.kept or None, one.other or None] for one in found]
    return table(["about", "device", kept, other], rows)


def _prune(args: argparse.Namespace) -> int:
    from dmuon_tune.cache import ArtefactStore, Store, retain, user_cache_path
    from dmuon_tune.measure.standing import once_each

    if not (args.stale or args.failures or args.losers):
        raise UsageError("say what to delete: --stale, --failures or --losers")
    steps: list[Contents] = []

    def pruned(contents: Contents) -> Contents:
        steps[:] = contents, contents.kept(_wanted(args, contents))
        return steps[-1]

    place = args.cache or str(user_cache_path())
    with opened_source(place) as source:  # a CacheError where there is none
        if args.dry_run:
            pruned(source.contents)
    if not args.dry_run:
        with Store.open(place) as store:
            retain(store, pruned)
            store.compact()
    before, left = steps
    folder = ArtefactStore.beside(place)
    gone = before.artefact_ids - left.artefact_ids
    stale_of = once_each() if args.stale else lambda key: None  # those of a chain's ends are of no result
    orphans = [each for each in folder.all() if each.id in gone or stale_of(each.key)]
    others = _of_neighbours(folder, place) if orphans else frozenset()
    orphans = [each for each in orphans if each.id not in others]
    if not args.dry_run:
        for artefact in orphans:
            folder.remove(artefact)
        folder.sweep()
    counts = _counts(left)
    deleted = {name: count - counts[name] for name, count in _counts(before).items()} | {"artefacts": len(orphans)}
    if args.format == "json":
        print_json({"deleted": deleted, "left": counts, "dry_run": args.dry_run})
    else:
        said = "would be deleted" if args.dry_run else "deleted"
        say(table(["", *deleted], [[said, *deleted.values()], ["left", *counts.values(), None]]))
    return 0


def _of_neighbours(folder: ArtefactStore, place: str) -> frozenset[str]:
    """The compiled kernels of what other caches hold whose files lie beside the same folder."""
    from dmuon_tune.cache import Store, contents_of

    found = frozenset[str]()
    for path in folder.folder.parent.glob("*.sqlite"):
        try:
            if os.path.exists(place) and os.path.samefile(path, place):
                continue
            with Store.open(path, read_only=True) as store:
                found |= contents_of(store).artefact_ids
        except (CacheError, OSError) as error:
            if path.exists():  # else a link that leads nowhere, a file that has just gone
                warn(f"compiled kernels that only {path} names count as this cache's, since it cannot be read: {error}")
    return found


def _wanted(args: argparse.Namespace, contents: Contents) -> Callable[[Trial], bool]:
    """Which results stay."""
    from dmuon_tune.measure.standing import once_each

    stale_of = once_each()
    serving = {result.identity for result in contents.only_winners().results}

    def wanted(result: Trial) -> bool:
        if args.failures and not result.measurement.ok:
            return False
        if args.losers and result.measurement.ok and result.identity not in serving:
            return False
        return not (args.stale and stale_of(result.key))

    return wanted

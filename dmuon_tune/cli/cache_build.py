"""``dmuon-tune cache build``: compiles a cache's winners to artefacts that training loads without a compiler."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import MissingEntryError, said
from dmuon_tune.words import counted

from . import options
from .output import note, print_json, say, table, warn

if TYPE_CHECKING:
    from dmuon_tune.cache import ArtefactStore, Store
    from dmuon_tune.device import DeviceFingerprint

BUILT, KEPT, BUSY, FAILED = "built", "kept", "busy", "failed"


@dataclass(frozen=True)
class Order:
    """One artefact to build, as it is sent to another process; ``config`` is JSON types."""

    folder: str
    kernel: str
    problem: Any
    config: dict[str, Any]
    device: DeviceFingerprint
    rebuild: bool


def register(actions: Any) -> None:
    parser = actions.add_parser(
        "build", parents=[options.common(), options.cache()], help="compile the winners, so that training need not",
        description="Compile the winners of a cache, and the kernels its recipes run, into the folder artefacts beside "
        "it, which training then loads without a compiler, nvcc or a kernel language. The GPU need not be here.",
    )
    parser.add_argument(
        "--arch", action="append", default=[], metavar="ARCH",
        help="only this architecture, such as sm_90a or cpu (default: every one that the cache holds; repeatable)",
    )
    parser.add_argument("--jobs", type=options.positive, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--rebuild", action="store_true", help="compile also what is there already")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from dmuon_tune.cache import ArtefactStore, Store, user_cache_path

    path = args.cache or str(user_cache_path())
    artefacts = ArtefactStore.beside(path)
    with Store.open(path, read_only=True) as store:
        orders = _orders(store, path, artefacts, args.arch, args.rebuild)
    if not orders:
        note("nothing to compile: the library or a kernel of another project won everything that is current")
    rows: list[dict[str, Any]] = []
    for order, (state, detail) in _results(orders, args.jobs):
        row = {
            "kernel": order.kernel, "problem": order.problem.label(), "arch": order.device.arch, "state": state,
            "detail": detail,
        }
        rows.append(row)
        note(f"{len(rows)}/{len(orders)} {state}: {order.kernel} for {row['problem']} on {row['arch']}")
    if args.format == "json":
        print_json({"folder": str(artefacts.folder), "artefacts": rows})
    else:
        say(table(["kernel", "problem", "arch", "state", "detail"], [list(row.values()) for row in rows]))
    failed = [row for row in rows if row["state"] == FAILED]
    if failed:
        note(f"error: {counted(len(failed), 'artefact')} not built; 'detail' says why, and training compiles these")
    return 1 if failed else 0


def _orders(
    store: Store, path: str, artefacts: ArtefactStore, wanted: Sequence[str], rebuild: bool
) -> list[Order]:
    """What to build for each device model of the cache; MissingEntryError where it holds nothing for ``wanted``."""
    from dmuon_tune.cache import Layers
    from dmuon_tune.measure.standing import winners
    from dmuon_tune.runtime.needed import needed
    from dmuon_tune.space import config_to_dict

    entries = store.entries()
    devices = list(dict.fromkeys(entry.key.device for entry in entries))
    chosen = [device for device in devices if not wanted or any(_is_arch(device, name) for name in wanted)]
    if not chosen:
        held = ", ".join(sorted({device.arch for device in devices})) or "nothing"
        what = f"for {', '.join(wanted)}" if wanted else "to build"
        raise MissingEntryError(f"cache {store.where} has nothing {what}; it holds {held}; tune there first")
    of_chosen = [("", entry) for entry in entries if entry.key.device in chosen]
    standing = winners(of_chosen)
    best = [found.entry for found in standing if found.stale is None]
    if len(best) < len(standing):
        stale = f"{len(standing) - len(best)} of {counted(len(standing), 'winner')}"
        warn(f"{stale} left out, made by other code or tools than this machine's; 'dmuon-tune show' says which")
    orders = []
    environ = {"DMUON_TUNE_CACHE_PATH": path, "DMUON_TUNE_CACHE_DIR": str(artefacts.folder.parent)}
    with Layers.open(environ) as layers:
        for device in chosen:
            of_device = [entry for entry in best if entry.key.device == device]
            for each in needed(layers, device, store.recipes(device), of_device):
                config = config_to_dict(each.config)
                orders.append(Order(str(artefacts.folder), each.spec.name, each.problem, config, device, rebuild))
    return orders


def _is_arch(device: DeviceFingerprint, name: str) -> bool:
    """Whether a device is of an architecture: ``sm_90a`` and ``sm_90`` are one, ``cpu`` is any CPU."""
    return name == device.kind or re.sub(r"(?<=\d)[af]$", "", name) == device.arch


def _results(orders: Sequence[Order], jobs: int) -> Iterator[tuple[Order, tuple[str, str]]]:
    """Each order with its state and detail. What another process is building is waited for at the end."""
    busy = []
    for order, result in _built(orders, jobs, wait=False):
        if result[0] == BUSY:
            busy.append(order)
        else:
            yield order, result
    yield from _built(busy, jobs, wait=True)


def _built(orders: Sequence[Order], jobs: int, wait: bool) -> Iterable[tuple[Order, tuple[str, str]]]:
    waits = [wait] * len(orders)
    if min(jobs, len(orders)) <= 1:
        yield from zip(orders, map(build, orders, waits), strict=True)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(min(jobs, len(orders)), multiprocessing.get_context("spawn")) as pool:
        yield from zip(orders, pool.map(build, orders, waits), strict=True)


def build(order: Order, wait: bool) -> tuple[str, str]:
    """Build one artefact where it is not there whole: (state, what it weighs or why it failed)."""
    from dmuon_tune.backends import backends, probe
    from dmuon_tune.cache import ArtefactError, ArtefactStore
    from dmuon_tune.kernel_specs import kernel
    from dmuon_tune.measure.build import compile_portable, tuning_key
    from dmuon_tune.space import config_from_dict

    spec, device, store = kernel(order.kernel), order.device, ArtefactStore(order.folder)
    reason = backends()[spec.backend].unavailable(device)
    if device.kind == "cpu" and device != probe.fingerprint("cpu"):
        reason = f"CPU code is compiled on the machine it was tuned on, {device.name}"
    if reason:
        return FAILED, reason
    key = tuning_key(spec, order.problem, device)
    with store.building(key.sha256, order.config, wait) as is_mine:
        if not is_mine:
            return BUSY, ""
        try:
            found = None if order.rebuild else store.find(key.sha256, order.config)
            if found is not None:
                store.read(found)
                return KEPT, counted(found.size_bytes, 'byte')
        except ArtefactError:
            pass  # damaged: built again
        try:
            code = compile_portable(spec, order.problem, config_from_dict(spec.Config, order.config), device)
        except Exception as error:  # a DSL may raise anything; the others are built all the same
            return FAILED, said(error)
        return BUILT, counted(store.add(key, order.config, code).size_bytes, 'byte')

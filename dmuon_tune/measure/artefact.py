"""Builds one artefact where it is not there whole, in a process that may hang or die in a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmuon_tune.cache.artefacts import Artefact, ArtefactError, ArtefactStore
from dmuon_tune.cache.key import TuningKey
from dmuon_tune.errors import DmuonTuneError, said
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.portable import PortableCode
from dmuon_tune.space import config_from_dict
from dmuon_tune.words import counted

from .build import compile_portable, tuning_key
from .job import BuildJob, Built

BUILT, KEPT, BUSY, FAILED = "built", "kept", "busy", "failed"


def key_of(job: BuildJob) -> TuningKey:
    """The key that the artefact is kept under."""
    return tuning_key(kernel(job.kernel_name), job.problem, job.target)


def kept(job: BuildJob) -> Built | None:
    """What there is already and whole; None where it is to be built."""
    store = ArtefactStore(job.folder)
    found = None if job.rebuild else _whole(store, key_of(job).sha256, job.config)
    return None if found is None else Built(KEPT, counted(found[0].size_bytes, "byte"))


def build_artefact(job: BuildJob, report: Callable[[str, Any], None]) -> Built:
    """Build it, against other processes that build the same; ``report`` is told of the phase, as a worker's parent is.
    """
    key, store = key_of(job), ArtefactStore(job.folder)
    report("phase", "waiting")
    with store.building(key.sha256, job.config, job.wait) as is_mine:
        if not is_mine:
            return Built(BUSY)
        report("phase", "compiling")
        there = kept(job)
        if there is not None:
            return there
        try:
            return Built(BUILT, counted(store.add(key, job.config, _code(job, store)).size_bytes, "byte"))
        except (Exception, SystemExit) as error:  # a DSL may raise anything; the others are built all the same
            return Built(FAILED, str(error) if isinstance(error, DmuonTuneError) else said(error))


def _code(job: BuildJob, store: ArtefactStore) -> PortableCode:
    same = _whole(store, job.like, job.config) if job.like else None
    if same is not None:
        artefact, data = same
        return PortableCode(artefact.format, data, artefact.launch)
    spec = kernel(job.kernel_name)
    return compile_portable(spec, job.problem, config_from_dict(spec.Config, job.config), job.target)


def _whole(store: ArtefactStore, key_sha256: str, config: dict[str, Any]) -> tuple[Artefact, bytes] | None:
    """An artefact and its code; None where there is none or it is damaged."""
    try:
        found = store.find(key_sha256, config)
        return None if found is None else (found, store.read(found))
    except ArtefactError:
        return None

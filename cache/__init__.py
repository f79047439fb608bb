"""The tuning cache: keys, a store that survives kills, and the read-only layers that training reads."""

from __future__ import annotations

if __name__ == "cache":
    raise ImportError("import dmuon_tune.cache, not cache")

from .artefacts import Artefact, ArtefactError, ArtefactStore
from .bundle import database_bytes, opened_bundle, take_artefacts, write_bundle
from .chains import ChainKey, ChainTrial
from .checked import Checked
from .claims import Claims
from .contents import Contents, contents_of, keep, retain
from .database import is_bundle
from .key import TuningKey
from .layers import LayerDescription, Layers, packaged_cache
from .merging import Conflict, conflicts, differences, gains, merged
from .paths import user_cache_path
from .results import CacheEntry, Trial
from .store import Store

__all__ = [
    "Artefact", "ArtefactError", "ArtefactStore", "CacheEntry", "ChainKey", "ChainTrial", "Checked", "Claims",
    "Conflict", "Contents", "LayerDescription", "Layers", "Store", "Trial", "TuningKey", "conflicts",
    "contents_of", "database_bytes", "differences", "gains", "is_bundle", "keep", "merged", "opened_bundle",
    "packaged_cache", "retain", "take_artefacts", "user_cache_path", "write_bundle",
]

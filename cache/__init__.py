"""The tuning cache: keys, a store that survives kills, and the read-only layers that training reads."""

from __future__ import annotations

if __name__ == "cache":
    raise ImportError("import dmuon_tune.cache, not cache")

from .artefacts import Artefact, ArtefactError, ArtefactStore
from .chains import ChainKey, ChainTrial
from .claims import Claims
from .key import TuningKey
from .layers import LayerDescription, Layers
from .paths import user_cache_path
from .store import CacheEntry, Store, Trial

__all__ = [
    "Artefact", "ArtefactError", "ArtefactStore", "CacheEntry", "ChainKey", "ChainTrial", "Claims", "LayerDescription",
    "Layers", "Store", "Trial", "TuningKey", "user_cache_path",
]

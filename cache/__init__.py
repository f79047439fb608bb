"""The tuning cache: keys, a store that survives kills, and the read-only layers that training reads."""

from __future__ import annotations

if __name__ == "cache":
    raise ImportError("import dmuon_tune.cache, not cache")

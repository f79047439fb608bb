"""Leaves its process as if all were well."""

import os

from gram_variant import variant

KERNEL = variant(__name__, lambda x, r, alpha: os._exit(0))

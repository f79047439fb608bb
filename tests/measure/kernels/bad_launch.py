"""Raises when launched."""

from gram_variant import variant


def launch(x, r, alpha):
    raise RuntimeError("too many resources requested")


KERNEL = variant(__name__, launch)

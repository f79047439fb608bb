"""Raises in a race's timed rounds, and does not before."""

from gram_variant import late


def fail():
    raise RuntimeError("too late")


KERNEL = late(__name__, fail)

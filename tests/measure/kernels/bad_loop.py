"""Computes for ever."""

from gram_variant import variant


def launch(x, r, alpha):
    while True:
        pass


KERNEL = variant(__name__, launch)

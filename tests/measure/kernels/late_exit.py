"""Ends its process in a race's timed rounds, and does not before."""

import os

from gram_variant import late


def fail():
    os._exit(9)


KERNEL = late(__name__, fail)

"""Right, and takes twenty milliseconds: more than the library on a busy machine."""

import time

from gram_variant import gram, variant


def launch(x, r, alpha):
    time.sleep(0.02)
    gram(x, r, alpha)


KERNEL = variant(__name__, launch)

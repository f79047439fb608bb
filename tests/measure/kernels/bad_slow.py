"""Right, and takes three milliseconds."""

import time

from gram_variant import gram, variant


def launch(x, r, alpha):
    time.sleep(0.003)
    gram(x, r, alpha)


KERNEL = variant(__name__, launch)

"""Right but for one entry of the last matrix and its mirror, off by a hundredth."""

from gram_variant import gram, variant


def launch(x, r, alpha):
    gram(x, r, alpha)
    r[-1, 0, 1] += 0.01
    r[-1, 1, 0] += 0.01


KERNEL = variant(__name__, launch)

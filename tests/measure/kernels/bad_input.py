"""Right, but changes its input."""

from gram_variant import gram, variant


def launch(x, r, alpha):
    gram(x, r, alpha)
    x[0, 0, 0] += 1


KERNEL = variant(__name__, launch)

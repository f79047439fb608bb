"""Right but for one element of every fifth launch of a matrix: what two launches, or three, mostly do not show."""

from itertools import count

from gram_variant import gram, variant

_CALLS = count(1)


def launch(x, r, alpha):
    gram(x, r, alpha)
    if not next(_CALLS) % 5:
        r[0, 0, 0] *= 1.01


KERNEL = variant(__name__, launch)

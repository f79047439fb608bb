"""Writes the upper half of its output."""

from gram_variant import Repeated, gram, variant


def launch(x, r, alpha):
    rows = r.shape[-2] // 2
    whole = r.clone()
    gram(x, whole, alpha)
    r[..., :rows, :] = whole[..., :rows, :]


KERNEL = variant(__name__, launch, config=Repeated)

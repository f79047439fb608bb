"""Right, but writes one element past its output."""

from gram_variant import gram, variant


def launch(x, r, alpha):
    gram(x, r, alpha)
    r.as_strided((1,), (1,), r.storage_offset() + r.numel()).fill_(0)


KERNEL = variant(__name__, launch)

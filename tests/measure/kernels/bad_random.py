"""Within the tolerance, but another result each time."""

import torch
from gram_variant import gram, variant


def launch(x, r, alpha):
    gram(x, r, alpha)
    noise = torch.rand_like(r)
    r *= 1 + 1e-6 * (noise + noise.mT)


KERNEL = variant(__name__, launch)

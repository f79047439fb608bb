"""Within the tolerance everywhere, but to different sides above and below the diagonal."""

import torch
from gram_variant import gram, variant


def launch(x, r, alpha):
    gram(x, r, alpha)
    side = torch.ones_like(r).triu(1) - torch.ones_like(r).tril(-1)
    r += side * 1.8e-5 * (r.abs() + r.square().mean((-2, -1), keepdim=True).sqrt())


KERNEL = variant(__name__, launch)

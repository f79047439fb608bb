"""Asks for more memory than there is."""

import torch
from gram_variant import Repeated, gram, variant


def launch(x, r, alpha):
    torch.empty(10**17, dtype=torch.uint8, device=x.device)  # refused whatever the system overcommits
    gram(x, r, alpha)


KERNEL = variant(__name__, launch, config=Repeated)

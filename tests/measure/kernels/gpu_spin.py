"""Never ends, on a GPU."""

import torch
from gram_variant import variant

KERNEL = variant(__name__, lambda x, r, alpha: torch.cuda._sleep(2**62))  # clock cycles: seventy years

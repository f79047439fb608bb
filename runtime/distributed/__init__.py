"""The optimizer over several ranks: each matrix orthogonalized once, by its owner, on PyTorch's own shards."""

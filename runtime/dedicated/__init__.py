"""Dedicated owners: weights come to the modules that use them and gradients go to the owners, beside computation."""

"""Attention over the paged pool: what a model asks for (`interface`), and who computes it."""

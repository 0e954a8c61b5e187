"""The arithmetic of a layer beside its attention: what a model asks for (`interface`), and who computes it."""

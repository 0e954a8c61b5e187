"""Kernels for GPUs, in Triton. Importing a module here imports triton; nothing else in the engine does."""

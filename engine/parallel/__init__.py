"""Tensor parallelism: one worker's model split over processes that compute every step together."""

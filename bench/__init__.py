"""Benchmarks, one file each; docs/benchmarks.md says what they measure and how to read a line."""

"""What the benchmarks share. Nothing here is a benchmark."""

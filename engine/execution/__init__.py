"""Steps on a device of their own: queued, captured, copied, while the host goes on. It runs on a CPU too."""

"""What every process needs around its work: time, errors, limits, flags, gRPC, membership, signals, telemetry."""

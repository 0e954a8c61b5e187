"""The decode worker: receives verified KV blocks and generates one token a step for each running sequence."""

"""One request over the cluster: its attempts, what its two workers say, failures, the receipt."""

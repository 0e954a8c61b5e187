"""How many workers of which role: changing a running cluster without cutting a stream, by hand or by a policy."""

"""Which workers there are, what each has told of itself, and how far it can be relied on."""

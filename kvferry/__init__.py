"""kvferry: the front door (command line, local launcher, Python client)."""

__version__ = "0.1.0"

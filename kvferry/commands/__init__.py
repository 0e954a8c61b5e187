"""The command line: one small module a command, listed in `registry.py`."""

"""Moves KV blocks from the pool of a prefill worker into the pool of a decode worker, so that it can be proven.

Read `receiver.py` (decode side) and `sender.py` (prefill side) first; `handoff.py` holds the states both obey.
"""

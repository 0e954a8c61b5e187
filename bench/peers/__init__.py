"""Adapters of the engines that are compared: each runs in an environment and a process of its own."""

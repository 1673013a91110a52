"""Preparing a start: the environment, free ports, memory, TLS, and one start at a time."""

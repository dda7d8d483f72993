"""Executors: how many workers run a step, and where."""

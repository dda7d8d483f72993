"""Models: what a checkpoint says, as data, and the backends that run it."""

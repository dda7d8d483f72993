"""Weight transfer from a trainer in another process: the names that trl imports. In colocated mode trl hands its
weights to `model.load_weights` of the running engine instead, which works."""

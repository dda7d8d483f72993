"""Drawing tokens: the random numbers, and the numpy reference that every kernel is compared with."""

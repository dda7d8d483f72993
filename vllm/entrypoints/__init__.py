"""Ways into the engine: the `LLM` class, the command line, the server."""

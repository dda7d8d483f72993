"""The engine: front end (`engine`), scheduler and KV cache (`core`), and what runs a step (`executor`, `worker`, `sample`)."""

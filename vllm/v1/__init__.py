"""The engine: front end (`engine`), scheduler and KV cache (`core`), what runs steps (`executor`, `worker`, `sample`)."""

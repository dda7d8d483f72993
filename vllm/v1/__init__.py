"""The engine: front end (`engine`), scheduler and KV cache (`core`), what runs a step (`executor`, `worker`, …)."""

"""The engine: front end (processor, fan-out, output processor) and core, with the clients that join them."""

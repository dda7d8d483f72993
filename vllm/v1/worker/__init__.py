"""What runs a step: the persistent arrays, the model runner, and the worker of each platform."""

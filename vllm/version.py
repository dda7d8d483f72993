"""The version: the API level of vLLM that clients see, and the number of this implementation's release."""

__version__ = "0.29.0+fanout.1"
__version_tuple__ = (0, 29, 0, "fanout.1")

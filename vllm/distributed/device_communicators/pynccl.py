"""`PyNcclCommunicator` is imported by trl 0.24 (for its server mode) even when it is not used."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import UnsupportedError


class PyNcclCommunicator:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("PyNcclCommunicator: weight transfer over NCCL is not built here")

"""`StatelessProcessGroup` is imported by trl 0.24 (for its server mode) even when it is not used."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.exceptions import UnsupportedError


class StatelessProcessGroup:
    @staticmethod
    def create(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError("StatelessProcessGroup.create: weight transfer over NCCL is not built here")

"""`trainer_init` is imported by trl 1.16 (for its server mode) even when it is not used."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.exceptions import UnsupportedError


def trainer_init(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError("weight_transfer.nccl_common.trainer_init: weight transfer over NCCL is not built here")

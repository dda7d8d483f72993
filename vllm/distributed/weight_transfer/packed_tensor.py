"""`packed_nccl_broadcast_producer` is imported by trl 1.16 (for its server mode) even when it is not used."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.exceptions import UnsupportedError


def packed_nccl_broadcast_producer(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "weight_transfer.packed_tensor.packed_nccl_broadcast_producer: weight transfer over NCCL is not built here"
    )

"""`NCCLTrainerSendWeightsArgs` and `NCCLWeightTransferEngine`: imported by trl where it sees a version below 0.28."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.exceptions import UnsupportedError


class NCCLTrainerSendWeightsArgs:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("NCCLTrainerSendWeightsArgs: weight transfer over NCCL is not built here")


class NCCLWeightTransferEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("NCCLWeightTransferEngine: weight transfer over NCCL is not built here")

    @staticmethod
    def trainer_init(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError("NCCLWeightTransferEngine.trainer_init: weight transfer over NCCL is not built here")

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            "NCCLWeightTransferEngine.trainer_send_weights: weight transfer over NCCL is not built here"
        )

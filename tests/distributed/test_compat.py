"""Names that programs import and that are not built say so when they are used."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_world_group,
)
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from vllm.exceptions import UnsupportedError


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (trainer_init, "trainer_init"),
        (packed_nccl_broadcast_producer, "packed_nccl_broadcast_producer"),
        (NCCLTrainerSendWeightsArgs, "NCCLTrainerSendWeightsArgs"),
        (NCCLWeightTransferEngine, "NCCLWeightTransferEngine"),
        (NCCLWeightTransferEngine.trainer_init, "trainer_init"),
        (NCCLWeightTransferEngine.trainer_send_weights, "trainer_send_weights"),
        (PyNcclCommunicator, "PyNcclCommunicator"),
        (StatelessProcessGroup.create, "StatelessProcessGroup"),
    ],
)
def test_refused_by_name(call: Callable[..., object], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        call("anything", packed=True)


def test_world_group() -> None:
    with pytest.raises(UnsupportedError, match="get_world_group"):
        get_world_group()


def test_tearing_down_nothing() -> None:
    destroy_model_parallel()
    destroy_distributed_environment()

"""Tear-down of process groups, as lighteval calls it after an evaluation; trl 0.24 imports `get_world_group`."""

from __future__ import annotations

from typing import NoReturn

from vllm.exceptions import UnsupportedError


def destroy_model_parallel() -> None:
    """Nothing to destroy: an engine holds no process group, and `LLM.shutdown` frees what it holds."""


def destroy_distributed_environment() -> None:
    """Nothing to destroy, as above."""


def get_world_group() -> NoReturn:
    raise UnsupportedError("vllm.distributed.parallel_state.get_world_group: there are no process groups here yet")

"""The worker on a GPU: as on a CPU, but for the device's check and for how its memory is divided.

A step's order is the runner's: the forward pass and the draws are put on the device's queue while Python prepares what
follows, and the only wait of a step is for its tokens. The next step is scheduled after that wait: the scheduler and
the runner's persistent arrays want the token values (docs/gpu.md says what a step ahead would need).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vllm.config import VllmConfig
from vllm.exceptions import ConfigError, UnsupportedError
from vllm.logger import init_logger
from vllm.model_executor.backends.interface import Backend, ForwardBatch, Int32s, SamplingBatch
from vllm.model_executor.spec import DecoderSpec
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.memory import kv_cache_blocks

logger = init_logger(__name__)

DEFAULT_FRACTION = 0.9
"""Of the card's memory, for weights, cache and a step's values together."""


class CUDAWorker(CPUWorker):
    """See `CPUWorker`. Raises UnsupportedError, naming it, where no card is."""

    device = "cuda"

    def __init__(self, config: VllmConfig) -> None:
        reason = _no_card()
        if reason is not None:
            raise UnsupportedError(f"device='cuda': {reason}")
        super().__init__(config)

    def _cache_blocks(self, backend: Backend, spec: DecoderSpec) -> int:
        """What `gpu_memory_utilization` of the card leaves beside the weights and the largest step, which is run once
        to see what it takes."""
        import torch

        config = self.config
        if config.cache.num_blocks is not None:
            return kv_cache_blocks(config, spec, 0)
        torch.cuda.reset_peak_memory_stats()
        largest_step(backend, config)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        foreign = total - free - torch.cuda.memory_reserved()  # other processes, and what CUDA itself keeps
        budget = cache_budget(config.cache.memory_fraction, total, peak + foreign)
        logger.info("GPU memory: %.2f GiB, of which a step and the weights take %.2f", total / 2**30, peak / 2**30)
        if config.cache.memory_bytes is not None:
            budget = min(budget, config.cache.memory_bytes)
        bounded = replace(config, cache=replace(config.cache, memory_fraction=None, memory_bytes=budget))
        return kv_cache_blocks(bounded, spec, budget)


def cache_budget(fraction: float | None, total: int, taken: int) -> int:
    """Bytes for the KV cache: `fraction` (0.9) of the card, less what is taken. Raises ConfigError without any."""
    share = DEFAULT_FRACTION if fraction is None else fraction
    budget = int(total * share) - taken
    if budget <= 0:
        raise ConfigError(
            f"no KV cache: gpu_memory_utilization={share} of {total:,} bytes is less than the {taken:,} that the "
            "weights, a step and others take",
            "gpu_memory_utilization",
        )
    return budget


def largest_step(backend: Backend, config: VllmConfig) -> None:
    """Runs a step of `max_num_batched_tokens` tokens in one sequence, and as many draws as there are slots."""
    tokens = min(config.scheduler.max_num_batched_tokens, config.model.max_model_len)
    blocks = -(-tokens // config.cache.block_size)
    backend.init_cache(blocks, config.cache.block_size)
    draws = min(config.scheduler.max_num_seqs, tokens)

    def int32s(*values: int) -> Int32s:
        return np.array(values, np.int32)

    try:
        hidden = backend.forward(
            ForwardBatch(
                token_ids=np.zeros(tokens, np.int32),
                positions=np.arange(tokens, dtype=np.int32),
                query_start=int32s(0, tokens),
                seq_lens=int32s(tokens),
                block_tables=np.arange(blocks, dtype=np.int32)[None],
                hidden_rows=np.arange(draws, dtype=np.int32),
                shared_rows=np.zeros((0, 2), np.int32),
                shared_blocks=np.zeros(0, np.int32),
            )
        )
        ones = np.ones(draws, np.float32)
        backend.sample(
            hidden,
            SamplingBatch(
                rows=np.arange(draws, dtype=np.int32),
                temperature=ones,
                top_k=np.zeros(draws, np.int32),
                top_p=ones * np.float32(0.9),
                min_p=np.zeros(draws, np.float32),
                seeds=np.zeros(draws, np.uint64),
                positions=np.zeros(draws, np.int64),
                num_logprobs=np.ones(draws, np.int32),
            ),
        )
    finally:
        backend.drop_cache()


def _no_card() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}); install requirements/cuda.txt"
    return None if torch.cuda.is_available() else "torch finds no CUDA device here"

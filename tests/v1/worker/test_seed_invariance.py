"""CONTRACT rule 6 below the engine: scheduler and runner together, on the fake backend and on every backend there is.

A seeded child's tokens and log-probabilities are the same bits alone, in a crowd, preempted or not, chunked at any
budget, with its first token drawn through a fork or on its own, shared or not, cached or not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.v1.worker.runner_fakes import EOS, VOCAB, Child, FakeBackend, config
from tests.v1.worker.test_model_runner import PARAMS, slow_tokens
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.uniproc import UniProcExecutor
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.worker.model_runner import ModelRunner


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], bytes, int]] = field(default_factory=list)
    reason: FinishReason = FinishReason.NONE
    error: str | None = None


class Engine:
    """schedule -> execute -> update, and what came of each handle."""

    def __init__(self, settings: VllmConfig, execute: Any, num_blocks: int) -> None:
        self.scheduler = Scheduler(settings, num_blocks)
        self.execute = execute
        self.results: dict[int, Result] = {}
        self.preemptions = self.forks = self.copies = 0

    @classmethod
    def fake(cls, settings: VllmConfig, num_blocks: int) -> Engine:
        backend = FakeBackend()
        backend.init_cache(num_blocks, settings.cache.block_size)
        return cls(settings, ModelRunner(settings, backend, VOCAB, [EOS]).execute, num_blocks)

    def add(self, handles: list[int], prompt: list[int], params: SamplingParams, priority: int = 0) -> None:
        self.results.update({handle: Result() for handle in handles})
        request = EngineCoreRequest(
            handles=handles,
            prompt_token_ids=np.array(prompt, np.int32),
            params=params,
            arrival_time=0.0,
            stream=bool(handles[0] % 2),
            priority=priority,
        )
        self.scheduler.add_request(request)

    def step(self) -> None:
        step = self.scheduler.schedule()
        if step.is_empty:
            self.take(self.scheduler.take_outputs())
            return
        self.forks += len(step.forks)
        self.copies += len(step.copies)
        out = self.scheduler.update(step, self.execute(step))
        self.take(out)
        self.scheduler.check_integrity()

    def take(self, out: EngineCoreOutputs | None) -> None:
        if out is None:
            return
        if out.stats is not None:
            self.preemptions = out.stats.num_preemptions
        for i, handle in enumerate(out.handles.tolist()):
            result = self.results[handle]
            assert result.reason == FinishReason.NONE
            first, stop = int(out.offsets[i]), int(out.offsets[i + 1])
            result.tokens += out.token_ids[first:stop].tolist()
            result.reason = FinishReason(int(out.finish_reasons[i]))
            result.error = out.errors.get(handle)
            if out.logprobs is not None:
                for entry in range(first, stop):
                    begin, end = out.logprobs.offsets[entry : entry + 2]
                    ids, values = out.logprobs.token_ids[begin:end], out.logprobs.logprobs[begin:end]
                    result.logprobs.append((ids.tolist(), values.tobytes(), int(out.logprobs.ranks[entry])))

    def run(self, limit: int = 5000) -> dict[int, Result]:
        for _ in range(limit):
            if not self.scheduler.has_unfinished():
                self.step()
                return self.results
            self.step()
        raise AssertionError("the engine does not come to an end")


def random_settings(rng: np.random.Generator, block_size: int = 4) -> tuple[VllmConfig, int]:
    """A configuration that forces chunks, waiting and preemption, and a number of blocks that holds one sequence."""
    base = config(max_num_seqs=int(rng.integers(1, 7)), block_size=block_size, max_model_len=48)
    budget = int(rng.choice([base.scheduler.max_num_seqs, 8, 40]))
    settings = replace(
        base,
        cache=replace(base.cache, enable_prefix_caching=bool(rng.random() < 0.5)),
        scheduler=replace(
            base.scheduler,
            max_num_batched_tokens=max(budget, base.scheduler.max_num_seqs),
            policy=str(rng.choice(["fcfs", "priority"])),
        ),
    )
    return settings, int(rng.integers(13, 30))


@pytest.mark.parametrize("seed", range(40))
def test_children_in_a_random_crowd_equal_the_plain_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    settings, blocks = random_settings(rng)
    engine = Engine.fake(settings, blocks)
    expected: dict[int, Child] = {}
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 25)).tolist() for _ in range(3)]
    waiting: list[tuple[list[int], list[int], SamplingParams]] = []
    for _ in range(int(rng.integers(3, 9))):
        options = dict(PARAMS[int(rng.integers(len(PARAMS)))])
        n = 1 if options.get("temperature") == 0.0 else int(rng.integers(1, 6))
        base = int(rng.integers(0, 2**62))
        length = int(rng.integers(1, 12))
        options["min_tokens"] = min(options.get("min_tokens", 0), length)
        params = SamplingParams(n=n, seed=base, max_tokens=length, ignore_eos=True, **options)
        prompt = prompts[int(rng.integers(len(prompts)))]
        handles = [1000 + len(expected) + i for i in range(n)]
        for i, handle in enumerate(handles):
            alone = SamplingParams(seed=base + i, max_tokens=length, ignore_eos=True, **options)
            expected[handle] = Child(handle, alone, base + i, np.array(prompt, np.int32), length)
        waiting.append((handles, prompt, params))
    while waiting or engine.scheduler.has_unfinished():
        if waiting and rng.random() < 0.4:
            engine.add(*waiting.pop(), priority=int(rng.integers(3)))
        engine.step()
    results = engine.run()
    for handle, child in expected.items():
        tokens = slow_program(child)
        assert results[handle].tokens == tokens, handle
        assert results[handle].reason in (FinishReason.LENGTH, FinishReason.STOP)


def slow_program(child: Child) -> list[int]:
    """`slow_tokens`, ended by a stop token after min_tokens; EOS is not banned, as the children ignore it."""
    tokens = slow_tokens(child, banned_eos=False)
    for i, token in enumerate(tokens):
        if i + 1 >= child.params.min_tokens and token in (child.params.stop_token_ids or []):
            return tokens[: i + 1]
    return tokens


def test_the_random_crowds_meet_what_they_are_for() -> None:
    """Preemptions, forks and copies do occur in such runs."""
    preemptions = forks = copies = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        settings, _ = random_settings(rng)
        settings = replace(settings, scheduler=replace(settings.scheduler, max_num_seqs=6, max_num_batched_tokens=24))
        engine = Engine.fake(settings, 14)
        for request in range(4):
            prompt = rng.integers(0, VOCAB, 10).tolist()
            engine.add([request * 10 + i for i in range(4)], prompt, SamplingParams(n=4, seed=1, max_tokens=30))
        engine.run()
        preemptions += engine.preemptions
        forks += engine.forks
        copies += engine.copies
    assert preemptions
    assert forks
    assert copies


def test_a_bad_processor_ends_its_request_and_no_other() -> None:
    """CONTRACT rule 33, on the core's side."""
    calls = []

    def fails_later(output_ids: list[int], logits: Any) -> Any:
        calls.append(len(output_ids))
        if len(output_ids) == 2:
            raise RuntimeError("enough")
        return logits

    engine = Engine.fake(config(), 64)
    prompt = [3, 1, 4, 1, 5]
    engine.add([1, 2, 3], prompt, SamplingParams(n=3, seed=5, max_tokens=6, logits_processors=[fails_later]))
    engine.add([4, 6], prompt, SamplingParams(n=2, seed=5, max_tokens=6))
    results = engine.run()
    assert {results[h].reason for h in (1, 2, 3)} <= {FinishReason.ERROR, FinishReason.ABORT}
    assert any("enough" in (results[h].error or "") for h in (1, 2, 3))
    for i, handle in enumerate((4, 6)):
        child = Child(handle, SamplingParams(max_tokens=6), 5 + i, np.array(prompt, np.int32), 6)
        assert results[handle].tokens == slow_tokens(child)
    assert calls


@pytest.fixture(scope="module", params=["torch-float32", "cpu-float32", "cpu-bfloat16"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> UniProcExecutor:
    """A small Llama with invented weights, on each backend that is there."""
    backend, dtype = request.param.split("-")
    if backend == "torch":
        pytest.importorskip("torch")
    else:
        cpu_backend = pytest.importorskip("vllm.model_executor.backends.cpu_backend")
        reason = cpu_backend.CpuBackend.is_available()
        if reason is not None:
            pytest.skip(f"no CPU kernels: {reason}")
    folder = tmp_path_factory.mktemp("llama")
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return UniProcExecutor(
        VllmConfig(
            ModelConfig("m", str(folder), max_model_len=128, dtype=dtype, load_format="dummy"),
            CacheConfig(num_blocks=64),
            device=DeviceConfig(backend=backend),
        )
    )


def on(executor: UniProcExecutor, num_blocks: int = 64, **limits: Any) -> Engine:
    """A fresh engine on the loaded model: another scheduler, another runner, any limits."""
    settings = replace(executor.config, scheduler=SchedulerConfig(**{"max_num_seqs": 8, **limits}))
    worker = executor.driver_worker
    runner = ModelRunner(settings, worker.model_runner.backend, worker.model.spec.vocab_size, [])
    return Engine(settings, runner.execute, num_blocks)


def requests() -> list[tuple[list[int], list[int], SamplingParams]]:
    rng = np.random.default_rng(11)
    made = []
    for number, (length, n) in enumerate([(1, 3), (16, 2), (17, 4), (40, 2), (40, 1)]):
        prompt = rng.integers(0, 300, length).tolist()
        params = SamplingParams(n=n, seed=77 + number, max_tokens=20, ignore_eos=True, logprobs=3, temperature=1.2)
        made.append(([number * 10 + i for i in range(n)], prompt, params))
    return made


def test_alone_equals_every_crowd(executor: UniProcExecutor) -> None:
    alone: dict[int, Result] = {}
    for handles, prompt, params in requests():
        for i, handle in enumerate(handles):
            single = SamplingParams(
                seed=(params.seed or 0) + i, max_tokens=20, ignore_eos=True, logprobs=3, temperature=1.2
            )
            engine = on(executor)
            engine.add([handle], prompt, single)
            alone |= engine.run()
    crowds: list[tuple[int, dict[str, Any]]] = [
        (64, {}),
        (64, {"max_num_batched_tokens": 13, "max_num_seqs": 7}),
        (12, {"max_num_batched_tokens": 50, "max_num_seqs": 6}),  # 12 blocks: preemption
        (64, {"max_num_seqs": 2}),
    ]
    preemptions = 0
    for blocks, limits in crowds:
        engine = on(executor, blocks, **limits)
        for request in requests()[:: -1 if blocks == 12 else 1]:
            engine.add(*request)
        results = engine.run()
        preemptions += engine.preemptions
        assert results.keys() == alone.keys()
        for handle, result in results.items():
            assert result.tokens == alone[handle].tokens, (limits, handle)
            assert result.logprobs == alone[handle].logprobs, (limits, handle)
            assert len(result.logprobs) == 20
    assert preemptions


def test_new_weights_give_new_tokens(executor: UniProcExecutor, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    own = UniProcExecutor(executor.config)
    handles, prompt, params = requests()[1]

    def tokens() -> list[list[int]]:
        engine = on(own)
        engine.add(handles, prompt, params)
        return [result.tokens for result in engine.run().values()]

    before = tokens()
    assert tokens() == before
    embed = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    own.driver_worker.model_runner.model.load_weights([("model.embed_tokens.weight", embed)])
    after = tokens()
    assert after != before
    assert tokens() == after
    own.shutdown()

"""Engine arguments: every keyword that programs pass, what is refused and how, and the configuration that comes out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

import pytest

from vllm import config as config_module
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import ConfigError, ModelNotFoundError, UnsupportedError
from vllm.model_executor import loader
from vllm.model_executor.backends import interface
from vllm.utils.argparse_utils import FlexibleArgumentParser, option_rules

CLIENT_KEYWORDS = """model tokenizer tokenizer_mode tokenizer_revision revision dtype seed trust_remote_code
tensor_parallel_size pipeline_parallel_size data_parallel_size max_model_len max_num_seqs max_num_batched_tokens
gpu_memory_utilization swap_space cpu_offload_gb enforce_eager enable_prefix_caching enable_chunked_prefill block_size
kv_cache_dtype quantization load_format download_dir enable_lora max_lora_rank enable_sleep_mode model_impl
distributed_executor_backend logprobs_mode max_logprobs disable_log_stats generation_config hf_overrides
skip_tokenizer_init""".split()


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config alone, for load_format="dummy"."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 128,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
                "hidden_act": "silu",
                "rope_theta": 10000.0,
            }
        )
    )
    return folder


def make(folder: Path, **kwargs: object) -> config_module.VllmConfig:
    return EngineArgs(model=str(folder), load_format="dummy", **kwargs).create_engine_config()  # type: ignore[arg-type]


def test_every_keyword_that_programs_pass_is_known_and_none_means_default() -> None:
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(CLIENT_KEYWORDS) <= names
    assert EngineArgs(**dict.fromkeys(names)) == EngineArgs()


def test_every_field_is_an_option_with_help() -> None:
    for field, rule in option_rules(EngineArgs):
        assert field.metadata["help"].endswith("."), field.name
        if rule.kind in (int, float):
            assert rule.low is not None, f"{field.name} has no range"
    assert len(option_rules(EngineArgs)) == len(dataclasses.fields(EngineArgs))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("model_len", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("max_seqs", "max_num_seqs"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(name: str, near: str) -> None:
    for cls in (EngineArgs, AsyncEngineArgs):
        with pytest.raises(TypeError, match=f"{name}.*did you mean '{near}'"):
            cls(**{name: 1})
    with pytest.raises(TypeError, match="'xqzw'$"):
        EngineArgs(xqzw=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", ["", 5]),
        ("dtype", ["int4", 5, "float64"]),
        ("seed", [True, -1, 1.5, "1", 2**63]),
        ("max_model_len", [-2, 1.5, True]),
        ("max_num_seqs", [0, -1, "8", True]),
        ("max_num_batched_tokens", [0]),
        ("max_n", [0]),
        ("block_size", [0, 3, 512]),
        ("gpu_memory_utilization", [0, -0.1, 1.01, math.nan, "half"]),
        ("swap_space", [-1, math.inf]),
        ("tensor_parallel_size", [0]),
        ("load_format", ["zip"]),
        ("logprobs_mode", ["raw"]),
        ("max_logprobs", [-2]),
        ("hf_overrides", [[1], {1: 2}]),
        ("trust_remote_code", ["yes", 1]),
        ("scheduling_policy", ["lifo"]),
        ("kv_cache_dtype", ["int3"]),
        ("backend", ["gpu"]),
    ],
)
def test_out_of_range(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name} must be ") as caught:
            EngineArgs(**{name: value})  # type: ignore[arg-type]
        assert isinstance(caught.value, ValueError)
        assert caught.value.parameter == name
        assert repr(value) in str(caught.value)


def test_a_changed_field_is_checked_again(tiny_config: Path) -> None:
    args = EngineArgs(model=str(tiny_config), load_format="dummy")
    args.max_num_seqs = 0
    with pytest.raises(ConfigError, match="max_num_seqs"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_mode", "slow"),
        ("load_format", "bitsandbytes"),
        ("model_impl", "transformers"),
        ("kv_cache_dtype", "fp8"),
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("distributed_executor_backend", "ray"),
        ("quantization", "awq"),
        ("revision", "v2"),
        ("tokenizer_revision", "v2"),
        ("enable_lora", True),
        ("hf_overrides", lambda config: config),
    ],
)
def test_what_is_not_built_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=name) as caught:
        EngineArgs(**{name: value}).create_engine_config()  # type: ignore[arg-type]
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    ("name", "value"),
    [("swap_space", 4), ("cpu_offload_gb", 1.5), ("download_dir", "/tmp"), ("trust_remote_code", True)],
)
def test_what_is_harmless_is_warned_about_once(
    tiny_config: Path, fresh_warnings: None, log: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    make(tiny_config, **{name: value})
    make(tiny_config, **{name: value})
    assert log.text.count(name) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("swap_space", 0),
        ("cpu_offload_gb", 0),
        ("enforce_eager", True),
        ("model_impl", "vllm"),
        ("revision", "main"),
        ("distributed_executor_backend", "external_launcher"),  # trl, with one process
        ("distributed_executor_backend", "mp"),
        ("tokenizer_mode", "hf"),
        ("gpu_memory_utilization", 0.3),
    ],
)
def test_what_is_honoured_is_silent(
    tiny_config: Path, fresh_warnings: None, log: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    make(tiny_config, **{name: value})
    assert log.text == ""


def test_an_unknown_environment_variable_is_warned_about(
    tiny_config: Path, fresh_warnings: None, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPCE", "4")
    make(tiny_config)
    assert "VLLM_CPU_KVCACHE_SPCE" in log.text


def test_defaults_of_the_configuration(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.delenv("VLLM_CPU_NUM_THREADS", raising=False)
    made = make(tiny_config)
    assert made.model.path == str(tiny_config)
    assert made.model.max_model_len == 512
    assert made.model.dtype in ("bfloat16", "float32")
    assert made.cache == config_module.CacheConfig()
    assert made.scheduler == config_module.SchedulerConfig()
    assert made.parallel == config_module.ParallelConfig()
    assert made.device == config_module.DeviceConfig()
    assert made.lora == config_module.LoRAConfig()
    assert made.observability == config_module.ObservabilityConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.model.max_model_len = 1  # type: ignore[misc]


def test_values_arrive(tiny_config: Path) -> None:
    made = make(
        tiny_config,
        dtype="half",
        seed=7,
        max_model_len=100,
        quantization="int8",
        hf_overrides={"max_position_embeddings": 256},
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        enable_sleep_mode=True,
        served_model_name="it",
        skip_tokenizer_init=True,
        block_size=8,
        gpu_memory_utilization=0.25,
        num_gpu_blocks_override=10,
        kv_cache_memory_bytes=1000,
        enable_prefix_caching=False,
        kv_cache_dtype="float32",
        max_num_seqs=3,
        max_num_batched_tokens=33,
        scheduling_policy="priority",
        max_n=5,
        backend="torch",
        num_threads=2,
        disable_log_stats=True,
        tokenizer=str(tiny_config),
    )
    model, cache, scheduler = made.model, made.cache, made.scheduler
    assert (model.dtype, model.seed, model.max_model_len, model.quantization) == ("float16", 7, 100, "int8")
    assert (model.hf_overrides, model.generation_config) == ({"max_position_embeddings": 256}, "vllm")
    assert (model.logprobs_mode, model.max_logprobs, model.enable_sleep_mode) == ("processed_logprobs", -1, True)
    assert (model.served_model_name, model.skip_tokenizer_init, model.tokenizer) == ("it", True, str(tiny_config))
    assert (cache.block_size, cache.memory_fraction, cache.num_blocks, cache.memory_bytes) == (8, 0.25, 10, 1000)
    assert (cache.enable_prefix_caching, cache.kv_dtype) == (False, "float32")
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_n) == (3, 33, 5)
    assert scheduler.policy == "priority"
    assert (made.device.backend, made.device.num_threads) == ("torch", 2)
    assert made.observability.log_stats is False


def test_max_model_len(tiny_config: Path) -> None:
    assert make(tiny_config, max_model_len=-1).model.max_model_len == 512
    assert make(tiny_config, max_model_len=512).model.max_model_len == 512
    with pytest.raises(ConfigError, match="max_model_len must be at most the model's limit, 512"):
        make(tiny_config, max_model_len=513)
    with pytest.raises(ConfigError, match="max_model_len"):
        make(tiny_config, max_model_len=0)


def test_token_budget_without_chunked_prefill(tiny_config: Path) -> None:
    assert make(tiny_config, enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 2048
    made = make(tiny_config, enable_chunked_prefill=False, max_num_batched_tokens=512)
    assert made.scheduler.max_num_batched_tokens == 512
    with pytest.raises(ConfigError, match="max_num_batched_tokens.*511.*max_model_len.*512"):
        make(tiny_config, enable_chunked_prefill=False, max_num_batched_tokens=511)


def test_environment(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    monkeypatch.setenv("VLLM_CPU_NUM_THREADS", "3")
    made = make(tiny_config)
    assert made.cache.memory_bytes == 2**29
    assert made.device.num_threads == 3
    made = make(tiny_config, kv_cache_memory_bytes=5, num_threads=1)
    assert (made.cache.memory_bytes, made.device.num_threads) == (5, 1)
    monkeypatch.setenv("VLLM_USE_V1", "0")
    with pytest.raises(UnsupportedError, match="VLLM_USE_V1"):
        make(tiny_config)
    monkeypatch.delenv("VLLM_USE_V1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert made.multiprocessing is True


def test_torch_dtypes_are_taken(tiny_config: Path) -> None:
    class Dtype:  # torch.bfloat16's str, without torch
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert make(tiny_config, dtype=Dtype()).model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("cpuinfo", "machine", "dtype"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 xtopology\n\n", "x86_64", "bfloat16"),
        ("processor : 0\nflags\t\t: fpu avx2\n\nprocessor : 1\nflags\t\t: avx512_bf16\n", "x86_64", "float32"),
        ("processor : 0\nFeatures\t: fp asimd bf16 i8mm\n", "aarch64", "bfloat16"),
        ("processor : 0\nFeatures\t: fp asimd\n", "aarch64", "float32"),
        ("", "riscv64", "float32"),
    ],
)
def test_default_dtype(monkeypatch: pytest.MonkeyPatch, cpuinfo: str, machine: str, dtype: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, **kwargs: cpuinfo)
    monkeypatch.setattr(arg_utils.platform, "machine", lambda: machine)
    assert arg_utils.default_dtype() == dtype


def test_a_missing_model() -> None:
    with pytest.raises(ModelNotFoundError, match="no/such/model"):
        EngineArgs(model="no/such/model").create_engine_config()
    with pytest.raises(ModelNotFoundError, match="no/such/tokenizer"):
        EngineArgs(tokenizer="no/such/tokenizer").create_engine_config()


def test_the_bundled_model(smollm2_path: Path) -> None:
    made = EngineArgs().create_engine_config()
    assert made.model.model == loader.DEFAULT_MODEL == arg_utils.DEFAULT_MODEL
    assert made.model.path == str(smollm2_path)
    assert made.model.max_model_len == 8192
    assert EngineArgs(quantization="gguf").create_engine_config().model.quantization is None


def test_a_gpu(tiny_config: Path) -> None:
    made = make(tiny_config, device="cuda", enforce_eager=True, allow_batch_variance=True)
    assert (made.device.device, made.model.dtype) == ("cuda", "bfloat16")
    assert made.device.enforce_eager
    assert made.device.allow_batch_variance
    with pytest.raises(UnsupportedError, match="cpu_offload_gb"):
        make(tiny_config, device="cuda", cpu_offload_gb=1)


def test_constants_agree_with_the_backends() -> None:
    assert arg_utils.PARTITION == interface.PARTITION


def parse(*words: str, cls: type[EngineArgs] = EngineArgs) -> EngineArgs:
    parser = cls.add_cli_args(FlexibleArgumentParser(prog="vllm", exit_on_error=False))
    return cls.from_cli_args(parser.parse_args(list(words)))


def test_command_line() -> None:
    assert parse() == EngineArgs()
    args = parse(
        "--model=m", "--max_model_len", "8k", "--no-enable-prefix-caching", "--enforce-eager", "--dtype", "float32",
        "--gpu-memory-utilization", "0.5", "--hf-overrides", '{"a": 1}', "--seed", "3",
    )  # fmt: skip
    assert args == EngineArgs(
        model="m",
        max_model_len=8000,
        enable_prefix_caching=False,
        enforce_eager=True,
        dtype="float32",
        gpu_memory_utilization=0.5,
        hf_overrides={"a": 1},
        seed=3,
    )
    assert isinstance(parse(cls=AsyncEngineArgs), AsyncEngineArgs)
    with pytest.raises(argparse.ArgumentError):
        parse("--dtype", "int4")
    with pytest.raises(ConfigError, match="max_num_seqs"):
        parse("--max-num-seqs", "0")

"""The machine's limits, and what a run needs of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.models_util import tiny_config
from vllm.benchmarks import machine
from vllm.benchmarks.measures import RequestRecord
from vllm.kernels import library as kernel_library
from vllm.model_executor.models.family import Config
from vllm.model_executor.models.registry import family_of
from vllm.model_executor.spec import DecoderSpec


@pytest.fixture(scope="module")
def spec() -> DecoderSpec:
    config = tiny_config("llama")
    return family_of(config["architectures"], None, "test").spec(Config(config))


def record(prompt: int, *children: int) -> RequestRecord:
    made = RequestRecord(0, prompt)
    for index, tokens in enumerate(children):
        made.saw(index, tokens, 1.0)
    return made


def test_matrices(spec: DecoderSpec) -> None:
    # hidden 64, inner 96, 4 heads and 2 kv heads of 16, 2 layers, 320 tokens; embeddings are looked up, not multiplied
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96
    assert machine.matrix_elements(spec) == (2 * layer, 320 * 64)


def test_need_of_one_child(spec: DecoderSpec) -> None:
    body, head = machine.matrix_elements(spec)
    need = machine.need(spec, "bfloat16", None, [record(10, 4)], steps=4, prompt_tokens_computed=10)
    kv = spec.kv_bytes_per_token(2)
    # Three decode steps read 10, 11, 12 and, of their own, 1, 2, 3 tokens: the step that writes a token reads it too.
    assert need.bytes == 4 * (body + head) * 2 + (3 * 10 + 1 + 2 + 3) * kv
    contexts = 10 * 11 / 2 + 3 * 10 + (1 + 2 + 3)
    assert need.flops == 2 * body * (10 + 3) + 2 * head * 4 + contexts * 2 * 4 * 4 * 16


def test_siblings_read_their_prompt_once(spec: DecoderSpec) -> None:
    kv = spec.kv_bytes_per_token(4)
    body, head = machine.matrix_elements(spec)
    alone = machine.need(spec, "float32", None, [record(100, 5)], steps=5, prompt_tokens_computed=100)
    shared = machine.need(spec, "float32", None, [record(100, 5, 5, 5)], steps=5, prompt_tokens_computed=100)
    assert shared.bytes - alone.bytes == 2 * 10 * kv  # their own tokens only
    assert alone.bytes == 5 * (body + head) * 4 + (400 + 10) * kv
    assert shared.flops > alone.flops


def test_a_window_bounds_what_is_read() -> None:
    """By hand, position by position: a query sees the last `window` positions, itself included."""
    config = tiny_config("gemma3")
    spec = family_of(config["architectures"], None, "test").spec(Config(config))
    windows = {layer.mixer.window for layer in spec.layers}
    assert windows == {None, 24}
    for window in windows:
        for prompt, lengths in ((10, [4]), (30, [5, 2]), (20, [40, 1, 3])):
            reach = window or 1000
            of_prompt = sum(min(place + 1, reach) for place in range(prompt))
            of_children = sum(min(prompt + own, reach) for length in lengths for own in range(1, length))
            once = 0
            for step in range(1, max(lengths)):
                # Own tokens by child, and the prompt's positions that the steps' windows still reach, once.
                seen = [min(step, reach) for length in lengths if step < length]
                once += sum(seen) + max(0, min(prompt, reach - step))
            assert machine._attended(prompt, lengths, window) == (of_prompt, of_children, once)


def test_int8_halves_the_weights_and_failed_requests_need_nothing(spec: DecoderSpec) -> None:
    body, head = machine.matrix_elements(spec)
    failed = record(10, 4)
    failed.error = "x"
    need = machine.need(spec, "bfloat16", "int8", [failed], steps=3, prompt_tokens_computed=0)
    assert need == machine.Need(3 * (body + head), 0.0)


def test_fractions() -> None:
    fractions = machine.Need(20.0, 30.0).fractions(machine.Limits(100.0, 50.0, 2), 0.5)
    assert fractions["bandwidth_fraction"] == 0.4
    assert fractions["flops_fraction"] == 1.2
    assert machine.Need(1.0, 1.0).fractions(machine.Limits(1.0, 1.0, 1), 0.0) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", [True, False])
def test_limits(monkeypatch: pytest.MonkeyPatch, dtype: str, kernels: bool) -> None:
    if not kernels:
        monkeypatch.setattr(machine, "_library", lambda: None)
    limits = machine.measure_limits(dtype, threads=1, megabytes=4)
    assert limits.threads == 1
    assert limits.bandwidth > 1e7
    assert limits.flops > 1e7


def test_the_kernel_library_measures() -> None:
    """Every variant that runs here: reading takes time, and 16-bit products are refused where there are none."""
    loaded = machine._library()
    if loaded is None:
        pytest.skip("the kernel library is not built, or older than its limits")
    data = np.ones(1000 * 16 + 5, np.float32)
    for isa in kernel_library.supported_isas():
        if not kernel_library.library_path(isa).is_file():
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CPU_ISA", isa)
            own = machine._library()
        assert own is not None
        assert own.vllm_limit_read(data.ctypes.data, data.size) > 0
        assert own.vllm_limit_multiply(0, 1000) > 0
        assert (own.vllm_limit_multiply(1, 1000) > 0) == (isa == "avx512bf16")


def test_peak_memory_counts_children() -> None:
    alone = machine.peak_memory()
    assert alone > 10 << 20
    code = "import sys; block = bytearray(b'x') * (64 << 20); print(len(block), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = machine.peak_memory()
        own = machine.peak_memory(child.pid)
        child.communicate()
    assert own > 64 << 20
    assert both >= alone + own - (1 << 20)
    assert machine.peak_memory(child.pid) == 0


def test_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert machine.listener(port) == os.getpid()
    assert machine.listener(port) is None

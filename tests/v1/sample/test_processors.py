"""A child's processors: forms, copies, and torch tensors on the same memory where torch is loaded."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from vllm.v1.sample.processors import ChildProcessors

IDS = np.array([4, 5], np.int32)


def run(processor: Any, copies: bool = False) -> np.ndarray:
    return ChildProcessors([processor], copies).bind(IDS, IDS[:1])(np.arange(6, dtype=np.float32))


def test_forms() -> None:
    def three(prompt: Any, output: Any, logits: Any) -> Any:
        return logits * 0 + len(prompt) * 10 + len(output)

    class Two:
        def __call__(self, output: Any, logits: Any) -> Any:
            return logits * 0 + len(output)

    assert run(three)[0] == 21
    assert run(Two())[0] == 1
    assert run(functools.partial(three, [1]))[0] == 11
    assert run(lambda output, logits: np.asarray(logits).astype(np.float64))[5] == 5


def test_processors_run_in_order() -> None:
    first = ChildProcessors([lambda o, x: x + 1, lambda o, x: x * 10], True)
    assert first.bind(IDS, IDS)(np.ones(2, np.float32)).tolist() == [20, 20]


def test_functions_are_not_copied_and_objects_are() -> None:
    calls = []

    def function(output: Any, logits: Any) -> Any:
        calls.append(1)
        return logits

    class Stateful:
        def __init__(self) -> None:
            self.calls: list[int] = []

        def __call__(self, output: Any, logits: Any) -> Any:
            self.calls.append(1)
            return logits

    stateful = Stateful()
    run(function, copies=True)
    run(stateful, copies=True)
    assert calls
    assert not stateful.calls
    run(stateful, copies=False)
    assert stateful.calls


def test_a_tensor_shares_the_memory_where_torch_is_loaded() -> None:
    torch = pytest.importorskip("torch")
    seen = []

    def in_place(output: Any, logits: Any) -> Any:
        seen.append(type(logits))
        logits[2] = 99.0
        return logits

    logits = np.zeros(4, np.float32)
    result = ChildProcessors([in_place], False).bind(IDS, IDS)(logits)
    assert seen == [torch.Tensor]
    assert result[2] == logits[2] == 99
    assert np.shares_memory(result, logits)
    half = ChildProcessors([lambda o, x: x.to(torch.bfloat16)], False).bind(IDS, IDS)(logits)
    assert half.dtype == np.float32


def test_without_torch_the_array_itself_comes() -> None:
    code = """
import sys, numpy as np
from vllm.v1.sample.processors import ChildProcessors
def check(output, logits):
    assert type(logits) is np.ndarray and type(output) is list
    return logits
ids = np.array([1], np.int32)
ChildProcessors([check], True).bind(ids, ids)(np.zeros(3, np.float32))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""Shared by the tests of the Triton kernels: they run in Triton's interpreter, or on a card where one is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
runtime = pytest.importorskip("vllm.kernels.triton.runtime")

if runtime.unavailable() is not None:
    pytest.skip(f"Triton kernels: {runtime.unavailable()}", allow_module_level=True)

DEVICE = torch.device(runtime.DEVICE)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def on_device(array):
    return torch.from_numpy(array).to(DEVICE)

"""The one place that knows where the Triton kernels run: on a card, or (`TRITON_INTERPRET=1`) in Triton's interpreter.

Triton reads that variable when it is first imported, so it has to be set before.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
"""What torch calls the device that the kernels run on."""
PARTITION = tl.constexpr(256)
"""`interface.PARTITION`, as kernels see it."""
_INTERPRETED = tl.constexpr(INTERPRETED)


def unavailable() -> str | None:
    """None, or why the kernels cannot run here."""
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "no CUDA device is here (TRITON_INTERPRET=1 runs the kernels on a CPU, for tests)"


def power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`: Triton's tensors have no other sizes."""
    return 1 << max(0, size - 1).bit_length()


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of a small array on the device, by way of pinned memory where there is a card, so that nothing waits."""
    tensor = torch.from_numpy(np.array(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@triton.jit
def dot(a, b):
    """a [m, k] times b [k, n], summed in fp32. fp32 operands are multiplied as they are (no TF32).

    The interpreter of triton 3.9 reads bf16 operands as integers; there they are widened first, which is exact.
    """
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")

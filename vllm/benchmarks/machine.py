"""What the machine can do, what a run needed of it, and how much memory was used.

A run's need is what no engine can avoid: every step reads the weights once and each live context once (a prompt shared
by siblings counts once), and every token goes through every matrix. The fraction of the limits is need / time / limit.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm.engine.arg_utils import default_dtype

if TYPE_CHECKING:
    from vllm.benchmarks.measures import RequestRecord
    from vllm.model_executor.spec import DecoderSpec

_ELEMENT_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True)
class Limits:
    """Measured on the spot; shared machines drift by the minute."""

    bandwidth: float
    """Bytes per second read from memory by all threads."""
    flops: float
    """Floating-point operations per second in the dtype of the matrix products (a multiply-add counts as two)."""
    threads: int


@dataclass(frozen=True)
class Need:
    """What a run cannot do without."""

    bytes: float = 0.0
    flops: float = 0.0

    def fractions(self, limits: Limits, seconds: float) -> dict[str, float]:
        """Of the machine's limits, over `seconds`."""
        if seconds <= 0:
            return {}
        return {
            "needed_bytes": self.bytes,
            "needed_flops": self.flops,
            "bandwidth_limit": limits.bandwidth,
            "flops_limit": limits.flops,
            "bandwidth_fraction": self.bytes / seconds / limits.bandwidth,
            "flops_fraction": self.flops / seconds / limits.flops,
        }


# Limits


def usable_threads() -> int:
    """Cores that the CPU backends would take."""
    from vllm import envs
    from vllm.kernels.library import available_threads

    return envs.VLLM_CPU_NUM_THREADS or available_threads()


def measure_limits(dtype: str = "float32", threads: int | None = None, megabytes: int = 64) -> Limits:
    """Read `megabytes` per thread, and multiply in registers (about half a second); the best of many turns, so that a
    neighbour on the machine disturbs it little.

    The kernel library does the work. Where it is not built numpy does: its fp32 product is the yardstick then, and
    counts double for 16-bit dtypes where the CPU multiplies those natively (twice as many per instruction).
    """
    threads = threads or usable_threads()
    blocks = [np.ones(megabytes << 18, np.float32) for _ in range(threads)]
    total = sum(block.nbytes for block in blocks)
    native = dtype in ("bfloat16", "float16", "int8") and default_dtype() == "bfloat16"
    library = _library()
    if library is not None:
        readers = [partial(library.vllm_limit_read, block.ctypes.data, block.size) for block in blocks]
        bandwidth = total / min(_together(readers) for _ in range(20))
        flops = max(float(library.vllm_limit_multiply(native, 20_000)) for _ in range(100))
        if flops < 0:  # a variant without 16-bit products
            flops = max(float(library.vllm_limit_multiply(0, 20_000)) for _ in range(100))
        return Limits(bandwidth, flops * threads, threads)
    seconds = min(
        _together([partial(np.bitwise_or.reduce, block.view(np.uint64)) for block in blocks]) for _ in range(20)
    )
    size = 512
    rng = np.random.default_rng(0)
    pairs = [[rng.random((size, size), np.float32) for _ in range(2)] for _ in range(threads)]
    # BLAS may have threads of its own or not: one caller, and one for each thread.
    flops = 0.0
    for callers in {1, threads}:
        spent = min(_together([partial(np.matmul, *pair) for pair in pairs[:callers]]) for _ in range(12))
        flops = max(flops, callers * 2 * size**3 / spent)
    return Limits(total / seconds, flops * (2 if native else 1), threads)


def _library() -> ctypes.CDLL | None:
    """The kernel library, if there is one here."""
    from vllm.kernels.library import KernelLibraryError, load

    try:
        library = load()
        read, multiply = library.vllm_limit_read, library.vllm_limit_multiply
    except (KernelLibraryError, AttributeError):
        return None
    read.restype = multiply.restype = ctypes.c_double
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    multiply.argtypes = [ctypes.c_int, ctypes.c_int64]
    return library


def _together(jobs: Sequence[Callable[[], object]]) -> float:
    """Seconds until all of them, each in a thread of its own, are done."""
    if len(jobs) == 1:
        start = time.perf_counter()
        jobs[0]()
        return time.perf_counter() - start
    barrier = threading.Barrier(len(jobs) + 1)

    def run(job: Callable[[], object]) -> None:
        barrier.wait()
        job()

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


# Need


def matrix_elements(spec: DecoderSpec) -> tuple[int, int]:
    """Weights that every token is multiplied with, and those of the head, with which a drawn token is."""
    body = sum(
        shape[0] * shape[1]
        for name, shape in spec.parameters().items()
        if len(shape) == 2 and name not in ("embed", "head")
    )
    return body, spec.vocab_size * spec.hidden_size


def need(
    spec: DecoderSpec,
    dtype: str,
    quantization: str | None,
    records: Iterable[RequestRecord],
    *,
    steps: int,
    prompt_tokens_computed: int,
) -> Need:
    """What the completed requests needed in `steps` steps of the engine."""
    body, head = matrix_elements(spec)
    weight_size = _ELEMENT_SIZE["int8" if quantization == "int8" else dtype]
    done = [record for record in records if record.completed]
    lengths = [[child.tokens for child in record.children.values()] for record in done]
    prompts = sum(record.prompt_tokens for record in done)
    drawn = sum(map(sum, lengths))
    decoded = sum(max(0, length - 1) for own in lengths for length in own)
    read = float(steps * (body + head) * weight_size)
    flops = float(2 * body * (prompt_tokens_computed + decoded) + 2 * head * drawn)
    share = min(1.0, prompt_tokens_computed / prompts) if prompts else 0.0
    for mixer, layers in Counter(layer.mixer for layer in spec.layers).items():
        pairs = contexts = 0.0
        for record, own in zip(done, lengths, strict=True):
            of_prompt, of_children, once = _attended(record.prompt_tokens, own, mixer.window)
            pairs += share * of_prompt + of_children
            contexts += once
        flops += layers * 4 * mixer.num_heads * mixer.head_dim * pairs
        read += layers * 2 * mixer.num_kv_heads * mixer.head_dim * _ELEMENT_SIZE[dtype] * contexts
    return Need(read, flops)


def _attended(prompt: int, lengths: Sequence[int], window: int | None) -> tuple[int, int, int]:
    """Of one request in one layer: (query, key) pairs of its prompt, those of its children, and the positions that its
    decode steps read when the prompt is read once for all children."""
    reach = prompt + max(lengths, default=0) if window is None else window
    of_prompt = int(np.minimum(np.arange(1, prompt + 1), reach).sum())
    of_children = once = 0
    for length in lengths:
        own = np.arange(1, length)  # its own tokens in the cache, in each step after the first
        of_children += int(np.minimum(prompt + own, reach).sum())
        once += int(np.minimum(own, reach).sum())
    longest = np.arange(1, max(lengths, default=0))
    once += int(np.clip(reach - longest, 0, prompt).sum())
    return of_prompt, of_children, once


# Memory


def peak_memory(pid: int | None = None) -> int:
    """Largest resident size so far of a process and its descendants, in bytes (sum of each one's own peak); 0 where
    /proc does not say."""
    return sum(_status_bytes(process, "VmHWM") for process in _family(os.getpid() if pid is None else pid))


def listener(port: int) -> int | None:
    """The process on this machine that listens on a TCP port, as far as one may look; None if unknown."""
    sockets: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(descriptor) in sockets for descriptor in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue  # another user's, or it has ended
    return None


def _family(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
    found, waiting = [], [pid]
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting += children.get(process, [])
    return found


def _status_bytes(pid: int, name: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0

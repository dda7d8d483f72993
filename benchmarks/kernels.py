"""Speed of the CPU kernels beside the limits of the machine, which are measured again before each table.

    python -m benchmarks.kernels [--kinds bfloat16,int8] [--threads 2] [--only gemm,decoder,sampling] [--isa avx2]

Times are the best of many turns. Matrix products run on more copies of the weights than the caches hold, one after the
other, as the layers of a model do. The cases are those of the correctness and invariance tests (`kernel_cases`,
`sampling_cases`).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable

import numpy as np

from benchmarks import sampling_cases
from benchmarks.kernel_cases import GEMM_CASES, SMOLLM2, SPEED_ROWS, STEP_CASES, GemmCase, StepCase, batch, int32s
from vllm.benchmarks.machine import Limits, measure_limits
from vllm.kernels import library, sampling
from vllm.kernels.matrix import PackedMatrix
from vllm.kernels.model import DecoderKernel
from vllm.model_executor.backends.interface import Float32s, ForwardBatch, Sampled, SamplingBatch

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_COLD_BYTES = 96 << 20  # of weights, more than the caches hold
_SECONDS = 0.6  # for each figure


def best(run: Callable[[], object], seconds: float = _SECONDS) -> float:
    """Shortest time of a call, over about `seconds` and at least three calls."""
    shortest, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - start)
        calls += 1
    return shortest


def report(name: str, seconds: float, size: float, flops: float, limits: Limits) -> None:
    """One line: time, GB/s, GFLOP/s, and which part of the time at the limits that is."""
    ideal = max(size / limits.bandwidth, flops / limits.flops)
    print(
        f"{name:<44}{seconds * 1e6:>12.1f} us{size / seconds / 1e9:>9.1f} GB/s{flops / seconds / 1e9:>9.1f} GFLOP/s"
        f"{100 * ideal / seconds:>7.0f} %",
        flush=True,
    )


def heading(title: str, kind: str, threads: int) -> Limits:
    limits = measure_limits(kind, threads)
    now = f"{limits.bandwidth / 1e9:.1f} GB/s, {limits.flops / 1e9:.0f} GFLOP/s"
    print(f"\n{title}  [limits now, with {threads} threads: {now}]")
    return limits


def bench_gemm(kind: str, threads: int, isa: str) -> None:
    limits = heading(f"matrix product, {kind}", kind, threads)
    for case in (case for case in GEMM_CASES if case.speed):
        copies = _copies(case, kind, threads, isa)
        for m in SPEED_ROWS:
            if case.n * m * 4 > 1 << 28:
                continue
            rows = case.rows(m)
            seconds = min(_turn(copies, rows, case.activation) for _ in range(6))
            weight_bytes = case.n * case.k * _BYTES[kind]
            report(f"{case.name} {case.n} x {case.k}, {m} rows", seconds, weight_bytes, 2 * case.n * case.k * m, limits)


def _turn(copies: list[PackedMatrix], rows: np.ndarray, activation: str | None) -> float:
    """Mean time of the product over all copies, one after the other."""
    total = 0.0
    for matrix in copies:
        matrix.multiply(rows, activation=activation)
        total += matrix.seconds
    return total / len(copies)


def _copies(case: GemmCase, kind: str, threads: int, isa: str) -> list[PackedMatrix]:
    weights = case.weights()
    copies = []
    for _ in range(max(1, _COLD_BYTES // (weights.size * _BYTES[kind]))):
        matrix = PackedMatrix(case.n, case.k, kind, case.activation is not None, threads, isa)
        matrix.pack(weights)
        copies.append(matrix)
    return copies


def step_need(case: StepCase, kind: str) -> tuple[float, float]:
    """(bytes, flops) a step cannot do without: weights once, each context once (shared ones once), every product.

    The last layer counts whole, though its feed-forward part runs for the asked rows only."""
    spec, size = SMOLLM2.spec, _BYTES[kind]
    weights = sum(
        np.prod(shape) for name, shape in spec.parameters().items() if len(shape) == 2 and name not in ("embed", "head")
    )
    kv = spec.kv_bytes_per_token(4 if kind == "float32" else 2)
    contexts = case.rows * case.context - (case.rows - 1) * case.shared
    pairs = case.rows * sum(range(case.context - case.tokens + 1, case.context + 1))
    attention = sum(4 * layer.mixer.num_heads * layer.mixer.head_dim for layer in spec.layers) * pairs
    return float(weights * size + contexts * kv), float(2 * weights * case.rows * case.tokens + attention)


def bench_decoder(kind: str, threads: int, isa: str) -> None:
    spec = SMOLLM2.spec
    kernel = DecoderKernel(spec, kind, threads, isa)
    rng = np.random.default_rng(0)
    for name, shape in spec.parameters().items():
        values = rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]) if len(shape) == 2 else np.ones(shape)
        kernel.set_rows(name, 0, values)
    limits = heading(f"steps of SmolLM2 (30 layers, without head), {kind}", kind, threads)
    for case in STEP_CASES:
        blocks, shared = -(-case.context // 16), case.shared // 16
        own = blocks - shared
        kernel.make_cache(shared + own * case.rows, 16)
        ids = rng.permutation(shared + own * case.rows)
        tables = [
            np.concatenate([ids[:shared], ids[shared + own * row : shared + own * (row + 1)]])
            for row in range(case.rows)
        ]
        first = case.context - case.tokens
        step = batch(
            rng.integers(0, spec.vocab_size, (case.rows, case.tokens)).tolist(),
            [first] * case.rows,
            int32s(tables),
            hidden=[(row + 1) * case.tokens - 1 for row in range(case.rows)],
            sets=[(0, case.rows, shared)] if shared else None,
        )
        for table in tables if first else []:  # pages that were never written would cost a fault
            text = rng.integers(0, spec.vocab_size, case.context).tolist()
            kernel_step(kernel, batch([text], [0], int32s([table]), hidden=[0]))
        kernel_step(kernel, step)
        kernel.profile()
        calls = [0]

        def run(step: ForwardBatch = step, calls: list[int] = calls) -> None:
            calls[0] += 1
            kernel_step(kernel, step)

        seconds = best(run)
        report(case.name, seconds, *step_need(case, kind), limits)
        parts = {name: value / calls[0] * 1e3 for name, value in kernel.profile().items()}
        print("      ms: " + "  ".join(f"{name} {value:.2f}" for name, value in parts.items() if value >= 0.005))


def kernel_step(kernel: DecoderKernel, step: ForwardBatch) -> None:
    kernel.forward(*[getattr(step, field.name) for field in dataclasses.fields(step)])


def bench_sampling(threads: int, isa: str) -> None:
    vocab = 49_152
    limits = heading("sampling from 49,152 logits, per row (16 rows, or one for a fork)", "float32", threads)
    handle = library.load(isa)

    def sample(logits: Float32s, drawn: SamplingBatch) -> Sampled:
        return sampling.sample(handle, logits, drawn, threads)

    for case, _, seconds in sampling_cases.measure(sample, vocab):
        report(case.name, seconds, 4 * vocab, 0.0, limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="bfloat16,int8,float32")
    parser.add_argument("--only", default="gemm,decoder,sampling")
    parser.add_argument("--threads", type=int, default=library.available_threads())
    parser.add_argument("--isa", default=None)
    args = parser.parse_args()
    isa = args.isa or library.choose_isa()
    parts = args.only.split(",")
    print(f"{isa} kernels; % is the time at the limits over the time taken")
    for kind in args.kinds.split(","):
        if "gemm" in parts:
            bench_gemm(kind, args.threads, isa)
        if "decoder" in parts:
            bench_decoder(kind, args.threads, isa)
    if "sampling" in parts:
        bench_sampling(args.threads, isa)


if __name__ == "__main__":
    main()

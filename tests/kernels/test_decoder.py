"""Whole steps in C++: against an fp64 decoder, and a row's bits in any batch, chunks, sharing and number of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.kernel_cases import DECODER_CASES, DecoderCase, batch, int32s, oracle
from tests.kernels.isas import ISAS, NOT_BUILT
from vllm.kernels.library import KernelError
from vllm.kernels.model import DecoderKernel
from vllm.model_executor.backends.interface import ForwardBatch, Int32s

pytestmark = pytest.mark.skipif(not ISAS, reason=NOT_BUILT)

LENGTH = 610  # over two partitions, in the middle of a block
BY_NAME = {case.name: case for case in DECODER_CASES}
LOGIT_TOLERANCE = {"float32": 2e-5, "bfloat16": 2.5e-2}
"""Largest error of a logit over the deviation of the row's logits."""


# Every case on the fastest variant, two of them on the others.
PAIRS = [(case, isa) for case in DECODER_CASES for isa in ISAS if isa == ISAS[-1] or case.name in ("llama", "gemma")]


@pytest.fixture(params=ISAS or ["none"])
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PAIRS or [None], ids=lambda pair: f"{pair[0].name}-{pair[1]}" if pair else "none")
def pair(request: pytest.FixtureRequest) -> tuple[DecoderCase, str]:
    return request.param  # type: ignore[no-any-return]


def make(
    case: DecoderCase, kind: str, isa: str, threads: int = 2, block_size: int = 16, blocks: int = 400
) -> DecoderKernel:
    kernel = DecoderKernel(case.spec, kind, threads, isa)
    for name, values in case.weights().items():
        kernel.set_rows(name, 0, values)
    kernel.make_cache(blocks, block_size)
    return kernel


def text(case: DecoderCase, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, case.spec.vocab_size, length).tolist()  # type: ignore[no-any-return]


def table(*rows: list[int]) -> Int32s:
    width = max(map(len, rows))
    return int32s([row + [-1] * (width - len(row)) for row in rows])


def shuffled(count: int, seed: int, total: int = 400) -> list[int]:
    return np.random.default_rng(seed).permutation(total)[:count].tolist()  # type: ignore[no-any-return]


def run(kernel: DecoderKernel, step: ForwardBatch) -> np.ndarray:
    names = [field.name for field in dataclasses.fields(ForwardBatch)]
    return kernel.forward(*[getattr(step, name) for name in names])


def whole(kernel: DecoderKernel, tokens: list[int], block_size: int = 16, seed: int = 1) -> np.ndarray:
    """Hidden rows of a sequence computed in one step, alone."""
    count = -(-len(tokens) // block_size)
    return run(kernel, batch([tokens], [0], table(shuffled(count, seed))))


@pytest.mark.parametrize("kind", LOGIT_TOLERANCE)
def test_against_fp64(pair: tuple[DecoderCase, str], kind: str) -> None:
    case, isa = pair
    tokens = text(case, LENGTH)
    kernel = make(case, kind, isa)
    found = kernel.logits(whole(kernel, tokens), int32s(range(LENGTH)))
    expected = oracle(case.spec, case.weights(), tokens, bf16=kind == "bfloat16")
    error = np.abs(found - expected) / expected.std(1, keepdims=True)
    assert error.max() < LOGIT_TOLERANCE[kind] * (1 if kind == "float32" else 4), error.max()
    assert np.sqrt((error**2).mean()) < LOGIT_TOLERANCE[kind]


def test_int8_is_near(pair: tuple[DecoderCase, str]) -> None:
    case, isa = pair
    tokens = text(case, 70)
    kernel = make(case, "int8", isa)
    found = kernel.logits(whole(kernel, tokens), int32s(range(70)))
    expected = oracle(case.spec, case.weights(), tokens)
    error = np.abs(found - expected) / expected.std(1, keepdims=True)
    assert np.sqrt((error**2).mean()) < 0.1


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_chunks_give_the_bits_of_the_whole(pair: tuple[DecoderCase, str], kind: str) -> None:
    case, isa = pair
    tokens, blocks = text(case, LENGTH), shuffled(-(-LENGTH // 16), 2)
    kernel = make(case, kind, isa)
    expected = whole(kernel, tokens)
    rng = np.random.default_rng(3)
    for sizes in ([1, 7, 64, 100], [255, 2, 255], [512, 1, 1]):
        start = 0
        while start < LENGTH:
            stop = min(LENGTH, start + int(rng.choice(sizes)))
            step = batch([tokens[start:stop]], [start], table(blocks[: -(-stop // 16)]))
            np.testing.assert_array_equal(run(kernel, step), expected[start:stop], err_msg=f"{start}:{stop}")
            start = stop


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_a_crowd(pair: tuple[DecoderCase, str], kind: str) -> None:
    """Decode and prefill rows of many lengths in one step, each as it is alone, with any number of threads."""
    case, isa = pair
    lengths = [1, 5, 16, 17, 255, 256, 257, 300, 511, 513, 600, 33]
    queries = [1, 5, 1, 3, 1, 20, 1, 1, 40, 1, 1, 33]
    texts = [text(case, length, seed) for seed, length in enumerate(lengths)]
    kernel = make(case, kind, isa)
    alone = [whole(kernel, tokens) for tokens in texts]
    free = shuffled(400, 9)
    tables = [[free.pop() for _ in range(-(-length // 16))] for length in lengths]
    for tokens, query, blocks in zip(texts, queries, tables, strict=True):
        if len(tokens) > query:
            run(kernel, batch([tokens[: len(tokens) - query]], [0], table(blocks)))
    step = batch(
        [tokens[len(tokens) - query :] for tokens, query in zip(texts, queries, strict=True)],
        [length - query for length, query in zip(lengths, queries, strict=True)],
        table(*tables),
    )
    expected = np.concatenate([rows[len(rows) - query :] for rows, query in zip(alone, queries, strict=True)])
    np.testing.assert_array_equal(run(kernel, step), expected)
    step.hidden_rows = int32s([0, 3, 40, len(expected) - 1])
    np.testing.assert_array_equal(run(kernel, step), expected[step.hidden_rows])


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_threads_do_not_change_bits(pair: tuple[DecoderCase, str], kind: str, threads: int) -> None:
    case, isa = pair
    tokens = text(case, LENGTH)
    expected = whole(make(case, kind, isa, threads=2), tokens)
    kernel = make(case, kind, isa, threads=threads)
    np.testing.assert_array_equal(whole(kernel, tokens), expected)
    # Long and alone: partitions go to different threads.
    blocks = table(shuffled(-(-LENGTH // 16), 1))
    np.testing.assert_array_equal(run(kernel, batch([tokens[-1:]], [LENGTH - 1], blocks)), expected[-1:])


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("prefix", [530, 256])
def test_a_shared_prefix_gives_the_bits_of_separate_ones(pair: tuple[DecoderCase, str], kind: str, prefix: int) -> None:
    case, isa = pair
    count, common = 6, text(case, prefix)
    texts = [common + text(case, 3 + 19 * i, i + 1) for i in range(count)]
    kernel = make(case, kind, isa)
    alone = [whole(kernel, tokens)[-1:] for tokens in texts]
    shared = prefix // 16
    free = shuffled(400, 4)
    leading = [free.pop() for _ in range(shared)]
    tables = [leading + [free.pop() for _ in range(-(-len(tokens) // 16) - shared)] for tokens in texts]
    lone = text(case, 40, 99)
    lone_blocks = [free.pop() for _ in range(3)]
    expected_lone = whole(kernel, lone)[-1:]
    run(kernel, batch([texts[0][: 16 * shared]], [0], table(leading)))
    run(kernel, batch([lone[:-1]], [0], table(lone_blocks)))
    for tokens, blocks in zip(texts, tables, strict=True):
        run(kernel, batch([tokens[16 * shared : -1]], [16 * shared], table(blocks)))
    step = batch(
        [[lone[-1]], *[[tokens[-1]] for tokens in texts]],
        [len(lone) - 1, *[len(tokens) - 1 for tokens in texts]],
        table(lone_blocks, *tables),
        sets=[(1, 3, shared), (4, count - 3, max(1, shared - 1))],
    )
    np.testing.assert_array_equal(run(kernel, step), np.concatenate([expected_lone, *alone]))


@pytest.mark.parametrize("block_size", [1, 4, 8, 32, 64, 256])
def test_block_sizes(block_size: int, isa: str) -> None:
    case = BY_NAME["gemma"]
    tokens = text(case, 300)
    for kind in ("float32", "bfloat16"):
        kernel = make(case, kind, isa, block_size=block_size, blocks=330)
        expected = oracle(case.spec, case.weights(), tokens, bf16=kind == "bfloat16")
        count = -(-300 // block_size)
        hidden = run(kernel, batch([tokens], [0], table(shuffled(count, 1, 330))))
        found = kernel.logits(hidden, int32s(range(300)))
        assert np.abs(found - expected).max() / expected.std() < 4 * LOGIT_TOLERANCE[kind]
        last = run(kernel, batch([tokens[-1:]], [299], table(shuffled(count, 1, 330))))
        np.testing.assert_array_equal(last, hidden[-1:])


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_what_an_earlier_owner_left_in_a_block_is_not_seen(kind: str, isa: str) -> None:
    case = BY_NAME["llama"]
    tokens = text(case, 45)
    kernel = make(case, kind, isa, blocks=3)
    expected = whole_in_order(kernel, tokens)
    weights = case.weights()
    kernel.set_rows("embed", 0, np.full_like(weights["embed"], np.nan))
    assert np.isnan(kernel.logits(whole_in_order(kernel, text(case, 48)), int32s([0]))).any()
    kernel.set_rows("embed", 0, weights["embed"])
    np.testing.assert_array_equal(whole_in_order(kernel, tokens), expected)
    for length in range(1, 46):  # token by token over another owner's numbers
        step = batch([tokens[length - 1 : length]], [length - 1], int32s([[0, 1, 2]]))
        np.testing.assert_array_equal(run(kernel, step), expected[length - 1 : length])


def whole_in_order(kernel: DecoderKernel, tokens: list[int]) -> np.ndarray:
    return run(kernel, batch([tokens], [0], int32s([[0, 1, 2]])))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_copied_blocks(kind: str, isa: str) -> None:
    case = BY_NAME["gemma"]
    tokens = text(case, 100)
    kernel = make(case, kind, isa, blocks=20)
    expected = run(kernel, batch([tokens], [0], int32s([range(7)])))
    kernel.copy_blocks(int32s([[i, 19 - i] for i in range(7)]))
    run(kernel, batch([text(case, 112, 5)], [0], int32s([range(7)])))  # the originals are overwritten
    step = batch([tokens[-1:]], [99], int32s([range(19, 12, -1)]))
    np.testing.assert_array_equal(run(kernel, step), expected[-1:])
    kernel.copy_blocks(np.zeros((0, 2), np.int32))
    with pytest.raises(KernelError, match="outside the cache"):
        kernel.copy_blocks(int32s([[0, 20]]))


def test_logits_of_any_rows(isa: str) -> None:
    case = BY_NAME["biases"]
    kernel = make(case, "bfloat16", isa)
    hidden = whole(kernel, text(case, 90))
    every = kernel.logits(hidden, int32s(range(90)))
    for rows in ([0], [89], [5, 3, 3, 88], list(range(20, 60))):
        np.testing.assert_array_equal(kernel.logits(hidden, int32s(rows)), every[rows])
    assert kernel.logits(hidden, int32s([])).shape == (0, case.spec.vocab_size)
    with pytest.raises(KernelError, match="no such hidden row"):
        kernel.logits(hidden, int32s([90]))


def test_two_models_in_threads(isa: str) -> None:
    """Engines share the pool: steps of two models, run by two threads, do not disturb each other."""
    import threading

    cases = [BY_NAME["llama"], BY_NAME["gemma"]]
    kernels = [make(case, "bfloat16", isa, threads=2 + i) for i, case in enumerate(cases)]
    texts = [text(case, 50) for case in cases]
    expected = [whole(kernel, tokens) for kernel, tokens in zip(kernels, texts, strict=True)]
    wrong: list[int] = []

    def work(i: int) -> None:
        results = [whole(kernels[i], texts[i]) for _ in range(20)]
        wrong.extend(i for result in results if not np.array_equal(result, expected[i]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_child_computes(isa: str) -> None:
    """The child of a fork has none of the parent's workers; it must neither hang nor compute something else."""
    import os
    import warnings

    case = BY_NAME["llama"]
    kernel = make(case, "bfloat16", isa, threads=3)
    tokens = text(case, 40)
    expected = whole(kernel, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking with threads
        pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(whole(kernel, tokens), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    np.testing.assert_array_equal(whole(kernel, tokens), expected)


Change = Callable[[ForwardBatch], None]


def _set(name: str, value: object) -> Change:
    return lambda step: setattr(step, name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("token_ids", int32s([0, 101, 2])), "outside the vocabulary"),
        (_set("token_ids", int32s([0, -1, 2])), "outside the vocabulary"),
        (_set("token_ids", int32s([0, 1])), "different lengths"),
        (_set("positions", int32s([0, 1, 3])), "positions"),
        (_set("query_start", int32s([0, 2])), "query_start"),
        (_set("seq_lens", int32s([2])), "row needs"),
        (_set("seq_lens", int32s([40])), "block table too short"),
        (_set("block_tables", int32s([[8]])), "outside the cache"),
        (_set("block_tables", int32s([[-1]])), "outside the cache"),
        (_set("block_tables", np.zeros((1, 0), np.int32)), "block table too short"),
        (_set("hidden_rows", int32s([3])), "hidden row"),
        (_set("hidden_rows", int32s([1, 1])), "ascend"),
        (_set("shared_blocks", int32s([1])), "different lengths"),
    ],
)
def test_bad_steps_are_refused(change: Change, message: str, isa: str) -> None:
    case = BY_NAME["llama"]
    kernel = make(case, "bfloat16", isa, blocks=8)
    step = batch([[1, 2, 3]], [0], int32s([[0]]))
    expected = run(kernel, step)
    change(step)
    with pytest.raises(KernelError, match=message):
        run(kernel, step)
    np.testing.assert_array_equal(run(kernel, batch([[1, 2, 3]], [0], int32s([[0]]))), expected)


def test_bad_sets_are_refused(isa: str) -> None:
    case = BY_NAME["llama"]
    kernel = make(case, "float32", isa, blocks=8)
    for sets in ([(0, 3, 0)], [(1, 2, 0)], [(0, 1, 0)], [(0, 2, 1)], [(0, 2, 0), (1, 2, 0)]):
        with pytest.raises(KernelError, match="shar"):
            run(kernel, batch([[1], [2]], [0, 0], int32s([[0], [1]]), sets=sets))


def test_an_empty_step(isa: str) -> None:
    kernel = make(BY_NAME["llama"], "bfloat16", isa, blocks=8)
    assert run(kernel, batch([], [], np.zeros((0, 4), np.int32))).shape == (0, kernel.row_bytes)


def test_no_cache_and_bad_caches(isa: str) -> None:
    case = BY_NAME["llama"]
    kernel = DecoderKernel(case.spec, "bfloat16", 1, isa)
    with pytest.raises(KernelError, match="no cache"):
        run(kernel, batch([[1]], [0], int32s([[0]])))
    for blocks, size, message in ((0, 16, "at least one"), (4, 0, "divide"), (4, 24, "divide"), (4, 512, "divide")):
        with pytest.raises(KernelError, match=message):
            kernel.make_cache(blocks, size)
    kernel.make_cache(4, 16)
    assert kernel.block_bytes > 0
    kernel.drop_cache()
    assert kernel.block_bytes == 0


def test_bad_weights_are_refused(isa: str) -> None:
    case = BY_NAME["llama"]
    kernel = DecoderKernel(case.spec, "bfloat16", 1, isa)
    with pytest.raises(KernelError, match="no such layer"):
        kernel.set_rows("layers.2.q", 0, np.zeros((192, 96), np.float32))
    with pytest.raises(KernelError, match="no such parameter"):
        kernel.set_rows("layers.0.q_bias", 0, np.zeros(192, np.float32))
    with pytest.raises(KernelError, match="outside the parameter"):
        kernel.set_rows("layers.0.k", 10, np.zeros((64, 96), np.float32))
    with pytest.raises(KernelError, match="whole"):
        kernel.set_rows("layers.0.input_norm", 0, np.zeros(95, np.float32))
    with pytest.raises(KernelError, match="tied"):
        kernel.set_rows("head", 0, np.zeros((101, 96), np.float32))

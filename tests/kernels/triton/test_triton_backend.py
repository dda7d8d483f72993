"""Whole steps on the Triton backend: against an fp64 decoder, and a row's bits in chunks, alone and shared."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.kernels.triton.interpreted import DEVICE, torch  # isort: skip
from benchmarks.kernel_cases import DECODER_CASES, DecoderCase, oracle
from tests.model_executor.driver import Driver
from vllm.config import DeviceConfig
from vllm.exceptions import UnsupportedError, UnsupportedSpecError, WeightError
from vllm.kernels.triton import attention
from vllm.kernels.triton.attention import Kind, plan
from vllm.model_executor.backends.interface import ForwardBatch, WeightTensor
from vllm.model_executor.backends.triton_backend import TritonBackend, _Staging, graph_rows

LENGTH = 260  # over one partition, in the middle of a block
BY_NAME = {case.name: case for case in DECODER_CASES}
DEVICE_CONFIG = DeviceConfig(device=DEVICE.type)


def make(case: DecoderCase, dtype: str = "float32") -> TritonBackend:
    backend = TritonBackend(case.spec, dtype, DEVICE_CONFIG)
    backend.load_weights(case.tensors())
    return backend


def text(case: DecoderCase, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(0).integers(0, case.spec.vocab_size, length).tolist()  # type: ignore[no-any-return]


def near_the_oracle(case: DecoderCase, found: np.ndarray, tokens: list[int], dtype: str) -> None:
    expected = oracle(case.spec, case.weights(), tokens, bf16=dtype == "bfloat16")
    error = np.abs(found - expected) / expected.std(1, keepdims=True)
    limits = {"float32": (2e-5, 5e-6), "bfloat16": (0.3, 0.03), "float16": (0.06, 0.006)}[dtype]
    assert (error.max(), np.sqrt((error**2).mean())) < limits


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "float32"), ("gemma", "float32"), ("llama", "bfloat16"), ("llama", "float16")]
)
def test_equals_fp64_and_itself_however_it_is_computed(name: str, dtype: str) -> None:
    """Over a partition's end: whole, in chunks, as decode rows beside others, and with a shared prefix."""
    case = BY_NAME[name]
    tokens = text(case)
    driver = Driver(make(case, dtype))
    whole = driver.add(tokens)
    expected = driver.step([(whole, LENGTH)], rows="all")
    near_the_oracle(case, expected, tokens, dtype)
    parts = driver.add(tokens)
    first = driver.step([(parts, 250)], rows="all")
    np.testing.assert_array_equal(first, expected[:250])
    # A chunk of this one, beside decode rows that share a prefix of one partition, and one that shares nothing.
    children = [driver.fork(whole) for _ in range(3)]
    for token, child in enumerate(children):
        child.tokens.append(token)
    other = driver.add(tokens[:1])
    together = driver.step([(parts, 9), (other, 1), *((child, 1) for child in children)], [(2, 3, 16)], rows="all")
    np.testing.assert_array_equal(together[:9], expected[250:259])
    np.testing.assert_array_equal(driver.step([(parts, 1)])[0], expected[259])
    for token, row in enumerate(together[10:]):
        alone = driver.fork(whole)
        alone.tokens.append(token)
        np.testing.assert_array_equal(driver.step([(alone, 1)])[0], row)


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"llama", "gemma"}))
def test_every_kind_of_decoder(name: str) -> None:
    case = BY_NAME[name]
    tokens = text(case, 40)
    driver = Driver(make(case), num_blocks=16)
    sequence = driver.add(tokens)
    found = np.concatenate([driver.step([(sequence, count)], rows="all") for count in (30, 1, 9)])
    near_the_oracle(case, found, tokens, "float32")


def test_the_tiles_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes larger tiles, for speed: here with those that a card gets."""
    monkeypatch.setattr(attention, "KEYS", 64)
    monkeypatch.setattr(Kind, "tile_rows", property(lambda kind: 16))
    case = DecoderCase("one layer", dataclasses.replace(BY_NAME["llama"].spec, layers=BY_NAME["llama"].spec.layers[:1]))
    tokens = text(case)
    driver = Driver(make(case))
    whole = driver.add(tokens)
    expected = driver.step([(whole, LENGTH)], rows="all")
    near_the_oracle(case, expected, tokens, "float32")
    whole.computed -= 1
    np.testing.assert_array_equal(driver.step([(whole, 1)])[0], expected[-1])


def test_kept_rows_outlive_the_next_step() -> None:
    case = BY_NAME["llama"]
    backend = make(case)
    driver = Driver(backend, num_blocks=16)
    sequence = driver.add(text(case, 5))
    logits = driver.step([(sequence, 4)], rows="all")
    kept = backend.keep(driver.hidden, np.array([3, 1], np.int32))
    driver.step([(sequence, 1)])
    np.testing.assert_array_equal(backend.logits(kept, np.array([0, 1], np.int32)), logits[[3, 1]])


def test_allowing_variance_takes_the_library() -> None:
    """Same numbers to rounding."""
    case = BY_NAME["biases"]
    backend = TritonBackend(case.spec, "float32", dataclasses.replace(DEVICE_CONFIG, allow_batch_variance=True))
    backend.load_weights(case.tensors())
    tokens = text(case, 12)
    driver = Driver(backend, num_blocks=4)
    near_the_oracle(case, driver.step([(driver.add(tokens), 12)], rows="all"), tokens, "float32")


def test_weights_are_checked_and_replaced() -> None:
    case = BY_NAME["biases"]
    tensors = case.tensors()
    backend = TritonBackend(case.spec, "float32", DEVICE_CONFIG)
    with pytest.raises(WeightError, match=r"no weight fills layers\.1\.down_bias"):
        backend.load_weights([tensor for tensor in tensors if tensor.name != "layers.1.down_bias"])
    backend.load_weights([tensor for tensor in tensors if tensor.name == "layers.1.down_bias"])
    with pytest.raises(WeightError, match="not a parameter"):
        backend.load_weights([dataclasses.replace(tensors[0], name="lm_head")])
    with pytest.raises(WeightError, match="shape"):
        backend.load_weights([dataclasses.replace(tensors[0], shape=(1, 2))])
    new = case.weights(seed=9)["layers.0.v"]
    backend.load_weights([WeightTensor("layers.0.v", new.shape, "float32", lambda: new)])
    held = backend._matrices["layers.0.qkv"].cpu().numpy()
    np.testing.assert_array_equal(held[-len(new) :], new)
    np.testing.assert_array_equal(held[: len(new)], case.weights()["layers.0.q"][: len(new)])


def test_what_it_cannot_run_is_named() -> None:
    spec = BY_NAME["llama"].spec
    layer = spec.layers[0]
    wide = dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, head_dim=512))
    assert "head size 512" in str(TritonBackend.supports(dataclasses.replace(spec, layers=(wide,)), "float32"))
    assert "quantization 'int8'" in str(TritonBackend.supports(spec, "bfloat16", "int8"))
    with pytest.raises(UnsupportedSpecError, match="dtype float64"):
        TritonBackend(spec, "float64", DEVICE_CONFIG)
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET"):
        TritonBackend(spec, "float32", DeviceConfig(device="cuda" if DEVICE.type == "cpu" else "cpu"))


def batch_of(counts: list[int], lengths: list[int], shared: list[tuple[int, int, int]] = []) -> ForwardBatch:  # noqa: B006
    start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.concatenate([np.arange(l - c, l) for c, l in zip(counts, lengths, strict=True)]).astype(np.int32)
    return ForwardBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        query_start=start,
        seq_lens=np.array(lengths, np.int32),
        block_tables=np.zeros((len(counts), 1), np.int32),
        hidden_rows=start[1:] - 1,
        shared_rows=np.array([one[:2] for one in shared], np.int32).reshape(-1, 2),
        shared_blocks=np.array([one[2] for one in shared], np.int32),
    )


@pytest.mark.parametrize("window", [None, 40, 300, 1000])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_tasks_cover_what_each_token_sees_once(window: int | None, group: int) -> None:
    """Of every token, each partition that it sees is in one task, or in one more for tokens of the same tile."""
    counts = [1, 700, 1, 1, 1, 1, 20, 1]
    lengths = [1, 900, 800, 801, 1025, 1300, 257, 2000]
    batch = batch_of(counts, lengths, [(2, 4, 33)])
    kind = Kind(group, window)
    tasks = plan(batch, kind, 16)
    seen: list[list[int]] = [[] for _ in batch.positions]
    for table in (tasks.fused, tasks.split):
        for first, count, row, length, begin, end in table.tolist():
            assert count * group <= kind.tile_rows
            for token in range(first, first + count):
                seen[token] += range(begin, end)
                assert end * 256 >= length or length == lengths[row]
    rows = np.repeat(np.arange(len(counts)), counts)
    for token, position in enumerate(batch.positions.tolist()):
        wanted = range(0 if window is None else max(0, position - window + 1) // 256, position // 256 + 1)
        assert len(seen[token]) == len(set(seen[token]))
        assert set(wanted) <= set(seen[token])
        assert min(seen[token]) == wanted[0] or counts[rows[token]] > 1 or rows[token] in range(2, 6)
    assert tasks.merged.tolist() == [int(batch.query_start[row]) for row in (0, 2, 3, 4, 5, 7)]
    assert tasks.span == 8
    if window is None:  # the set's two whole partitions stand in one tile where the group leaves room
        assert len(tasks.split) == 6 + -(-4 // kind.tile_tokens)


def test_padded_sizes_of_graphs() -> None:
    sizes = [graph_rows(rows) for rows in range(1, 1025)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert sorted(sizes) == sizes
    assert len(set(sizes)) < 40
    assert {graph_rows(size) for size in sizes} == set(sizes)


def test_staged_integers_stay_in_one_place() -> None:
    """Two sends of one layout lie at the same addresses, which is what a graph needs; padding is filled."""
    staging = _Staging(DEVICE)
    parts = [(np.arange(3, dtype=np.int32), (5,), -1), (np.ones((2, 2), np.int32), (3, 4), 0)]
    first = staging.send(parts)
    places = [view.data_ptr() for view in first]
    assert first[0].tolist() == [0, 1, 2, -1, -1]
    assert first[1].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    parts[0] = (np.arange(7, 11, dtype=np.int32), (5,), -1)
    second = staging.send(parts)
    assert [view.data_ptr() for view in second] == places
    assert first[0].tolist() == [7, 8, 9, 10, -1]
    bigger = staging.send([(np.arange(1000, dtype=np.int32), (1000,), 0)])
    assert bigger[0].tolist() == list(range(1000))


def test_a_padded_decode_step_gives_the_bits_of_the_bare_one() -> None:
    """What a graph replays (padded rows, tables and tasks) run eagerly."""
    case = BY_NAME["llama"]
    backend = make(case)
    driver = Driver(backend, num_blocks=16)
    sequences = [driver.add(text(case, length)) for length in (3, 18, 20)]
    driver.step([(sequence, len(sequence.tokens)) for sequence in sequences])
    for sequence in sequences:
        sequence.tokens += [1, 1]
    captured = []

    def capture(inputs):
        captured.append(inputs)
        return torch.zeros(0)

    expected = driver.step([(sequence, 1) for sequence in sequences])
    for sequence in sequences:
        sequence.computed -= 1
    backend.use_graphs = True
    backend._capture = capture  # type: ignore[method-assign, assignment]
    found = driver.step([(sequence, 1) for sequence in sequences])
    np.testing.assert_array_equal(found, expected)
    assert captured[0].token_ids.shape == (4,)
    assert captured[0].tables.shape == (4, 16)

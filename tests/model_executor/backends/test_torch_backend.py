"""The torch reference backend: the same bits alone, in a crowd, chunked, shared, on any threads; the interface."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.model_executor.driver import Driver, log_softmax
from tests.models_util import random_weights, tiny_config, tiny_folder
from vllm.config import DeviceConfig
from vllm.exceptions import UnsupportedSpecError, WeightError
from vllm.model_executor.backends.interface import ForwardBatch, Ragged, SamplingBatch, WeightTensor
from vllm.model_executor.backends.torch_backend import TorchBackend
from vllm.model_executor.loader import open_checkpoint
from vllm.v1.sample.reference import sample, token_logprobs

LONG = 600  # three partitions


def load(family="llama", dtype="float32", quantization=None, **overrides):
    with open_checkpoint(tiny_folder(family, **overrides)) as checkpoint:
        backend = TorchBackend(checkpoint.spec, dtype, quantization=quantization)
        backend.load_weights(checkpoint.weights())
    return backend


_backends: dict = {}


def backend_for(family="llama", dtype="float32", **overrides):
    """One backend per kind for the whole module; each Driver gives it a fresh cache."""
    key = (family, dtype, *overrides.items())
    if key not in _backends:
        _backends[key] = load(family, dtype, **overrides)
    return _backends[key]


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


KINDS = [
    ("llama", "float32"),
    ("llama", "bfloat16"),
    ("llama", "float16"),
    ("qwen3", "float32"),
    ("gemma3", "float32"),
    ("gemma3", "bfloat16"),
]


@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_whole_chunked_and_token_by_token_are_the_same_bits(family, dtype):
    driver = Driver(backend_for(family, dtype), num_blocks=256)
    tokens = prompt(LONG)
    whole = driver.step([(driver.add(tokens), LONG)], rows="all")
    chunked = driver.add(tokens)
    parts = []
    for chunk in itertools.cycle([1, 7, 64, 130, 255, 3]):
        left = LONG - chunked.computed
        if not left:
            break
        parts.append(driver.step([(chunked, min(chunk, left))], rows="all"))
    assert np.array_equal(np.concatenate(parts), whole)
    decoded = driver.add(tokens)
    driver.step([(decoded, 500)])
    single = [driver.step([(decoded, 1)])[0] for _ in range(100)]
    assert np.array_equal(np.stack(single), whole[500:])


@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_a_crowd_of_strangers_changes_nothing(family, dtype):
    driver = Driver(backend_for(family, dtype), num_blocks=400)
    lengths = [300, 1, 17, 256, 257, 90, 5, 64, 31]
    sequences = [driver.add(prompt(length, seed=length)) for length in lengths]
    alone = [driver.step([(driver.add(s.tokens), len(s.tokens))], rows="all") for s in sequences]
    together = driver.step([(s, len(s.tokens)) for s in sequences], rows="all")
    assert np.array_equal(together, np.concatenate(alone))
    # and in decode, in another order, beside a prefill
    following = [driver.add([*s.tokens, 77]) for s in sequences]
    for sequence in following:
        driver.step([(sequence, len(sequence.tokens) - 1)])
    expected = [driver.step([(sequence, 1)])[0] for sequence in following]
    again = [driver.add([*s.tokens, 77]) for s in sequences]
    for sequence in again:
        driver.step([(sequence, len(sequence.tokens) - 1)])
    order = [4, 8, 0, 2, 6, 1, 3, 7, 5]
    work = [(again[i], 1) for i in order]
    work.insert(3, (driver.add(prompt(70, seed=70)), 70))
    logits = np.delete(driver.step(work), 3, axis=0)
    assert np.array_equal(logits, np.stack([expected[i] for i in order]))


@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_a_shared_prefix_read_once_is_the_same_bits(family, dtype):
    driver = Driver(backend_for(family, dtype), num_blocks=400)
    parent = driver.add(prompt(LONG))
    driver.prefill(parent)
    children = [driver.fork(parent) for _ in range(23)]
    others = [driver.add(prompt(40 + i, seed=9 + i)) for i in range(2)]
    for other in others:
        driver.step([(other, len(other.tokens) - 1)])
    for index, child in enumerate(children):
        child.tokens += prompt(4, seed=index)
    blocks = LONG // driver.block_size

    def step(shared, chunk):
        states = [(child.computed, len(child.blocks)) for child in children]
        logits = driver.step([(others[0], 1), *((child, chunk) for child in children), (others[1], 1)], shared)
        for child, (computed, _) in zip(children, states, strict=True):
            child.computed = computed
        for other in others:
            other.computed -= 1
        return logits

    for chunk in (1, 3):
        plain = step([], chunk)
        assert len(np.unique(plain[1:-1], axis=0)) > 20
        assert np.array_equal(step([(1, 23, blocks)], chunk), plain)
        assert np.array_equal(step([(1, 10, blocks), (11, 13, blocks - 3)], chunk), plain)
        assert np.array_equal(step([(1, 2, 1), (20, 4, 16)], chunk), plain)
    for child in children:  # alone
        child.computed = LONG
    one = driver.step([(children[5], 3)])
    assert np.array_equal(one[0], plain[6])


@settings(max_examples=15)
@given(st.data())
def test_any_schedule_gives_the_same_bits(data):
    family = data.draw(st.sampled_from(["llama", "gemma3"]))
    backend = backend_for(family, "bfloat16")
    lengths = data.draw(st.lists(st.integers(1, 290), min_size=1, max_size=5))
    block_size = data.draw(st.sampled_from([1, 8, 16, 24, 256, 300]))
    driver = Driver(backend, num_blocks=-(-1500 // block_size) + 40, block_size=block_size)
    expected = []
    for index, length in enumerate(lengths):
        sequence = driver.add(prompt(length, seed=index))
        expected.append(driver.step([(sequence, length)], rows="all"))
        driver.free += sequence.blocks
    sequences = [driver.add(prompt(length, seed=index)) for index, length in enumerate(lengths)]
    rows: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(s.computed < len(s.tokens) for s in sequences):
        ready = [i for i, s in enumerate(sequences) if s.computed < len(s.tokens)]
        chosen = data.draw(st.permutations(ready).map(lambda order: order[: max(1, len(order) - 1)]))
        work = [(i, data.draw(st.integers(1, len(sequences[i].tokens) - sequences[i].computed))) for i in chosen]
        logits = driver.step([(sequences[i], count) for i, count in work], rows="all")
        first = 0
        for i, count in work:
            rows[i].append(logits[first : first + count])
            first += count
    for parts, whole in zip(rows, expected, strict=True):
        assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_threads_gives_the_same_bits(dtype):
    backend = backend_for("llama", dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            driver = Driver(backend, num_blocks=200)
            sequences = [driver.add(prompt(length, seed=length)) for length in (400, 33, 130)]
            logits = driver.step([(s, len(s.tokens)) for s in sequences], rows="all")
            for sequence in sequences:
                sequence.tokens.append(5)
            results.append((logits, driver.step([(s, 1) for s in sequences])))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_the_threads_asked_for_are_set():
    threads = torch.get_num_threads()
    try:
        spec = backend_for().spec
        TorchBackend(spec, "float32", DeviceConfig(num_threads=threads + 1))
        assert torch.get_num_threads() == threads + 1
        TorchBackend(spec, "float32", DeviceConfig(num_threads=None))
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_dtypes_stay_near_fp32(dtype):
    tokens = prompt(300)
    logits = {}
    for name in ("float32", dtype):
        driver = Driver(backend_for("llama", name))
        logits[name] = log_softmax(driver.step([(driver.add(tokens), 300)], rows="all"))
    error = np.abs(logits[dtype] - logits["float32"])
    assert 0 < error.mean() < (0.02 if dtype == "bfloat16" else 0.004)


# What a step leaves to others


def test_stale_numbers_of_other_sequences_do_not_leak():
    """A sequence of NaN in a block that another takes over afterwards, partly."""
    backend = load()
    driver = Driver(backend, num_blocks=4)
    tokens = prompt(20)
    clean = driver.step([(driver.add(tokens), 20)], rows="all")
    for cache in backend._caches:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    dirty = Driver.step(driver, [(driver.add(tokens), 20)], rows="all")
    assert np.array_equal(clean, dirty)


def test_copy_blocks_and_fork():
    driver = Driver(backend_for())
    parent = driver.add(prompt(40))
    driver.prefill(parent)
    child = driver.fork(parent)
    assert child.blocks[:2] == parent.blocks[:2]
    assert child.blocks[2] != parent.blocks[2]
    parent.tokens.append(1)
    child.tokens.append(2)
    logits = driver.step([(parent, 1), (child, 1)])
    for row, token in enumerate((1, 2)):
        fresh = driver.add([*prompt(40), token])
        assert np.array_equal(driver.prefill(fresh), logits[row])
    driver.backend.copy_blocks(np.zeros((0, 2), np.int32))


def test_hidden_rows_and_keep():
    driver = Driver(backend_for())
    backend = driver.backend
    everything = driver.step([(driver.add(prompt(30)), 30)], rows="all")
    kept = backend.keep(driver.hidden, np.array([29, 3, 3], np.int32))
    driver.step([(driver.add(prompt(50, seed=4)), 50)])
    again = backend.logits(kept, np.array([0, 1, 2], np.int32))
    assert np.array_equal(again, everything[[29, 3, 3]])
    assert backend.logits(kept, np.zeros(0, np.int32)).shape == (0, backend.spec.vocab_size)


def test_a_step_without_hidden_rows_and_an_empty_step():
    backend = load()
    driver = Driver(backend)
    table = np.array([[3]], np.int32)
    none = np.zeros(0, np.int32)
    batch = ForwardBatch(
        np.array([5], np.int32), np.zeros(1, np.int32), np.array([0, 1], np.int32), np.array([1], np.int32),
        table, none, np.zeros((0, 2), np.int32), none,
    )  # fmt: skip
    assert backend.logits(backend.forward(batch), none).shape == (0, 320)
    empty = ForwardBatch(
        none, none, np.zeros(1, np.int32), none, np.zeros((0, 1), np.int32), none, np.zeros((0, 2), np.int32), none
    )
    assert backend.logits(backend.forward(empty), none).shape == (0, 320)
    assert driver.prefill(driver.add([5, 6])).shape == (320,)


def test_the_cache_is_not_touched_before_it_is_written():
    import resource

    backend = load()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    backend.init_cache(100_000, 16)  # 800 MB
    driver = Driver.__new__(Driver)
    driver.backend, driver.block_size, driver.free = backend, 16, [5, 99_999, 7, 50_000]
    driver.prefill(driver.add(prompt(20)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB
    backend.drop_cache()
    with pytest.raises(RuntimeError, match="before init_cache"):
        driver.step([(driver.add([1]), 1)])
    backend.init_cache(4, 16)
    driver.free = [0, 1]
    driver.prefill(driver.add([1]))
    backend.close()


# Draws


def draws(size, **changes):
    values = {
        "rows": np.zeros(size, np.int32),
        "temperature": np.ones(size, np.float32),
        "top_k": np.zeros(size, np.int32),
        "top_p": np.ones(size, np.float32),
        "min_p": np.zeros(size, np.float32),
        "seeds": np.arange(size, dtype=np.uint64),
        "positions": np.zeros(size, np.int64),
        "num_logprobs": np.full(size, -1, np.int32),
    }
    return SamplingBatch(**(values | changes))


def test_sample_is_the_reference_sampler_on_the_logits(monkeypatch):
    driver = Driver(backend_for())
    backend = driver.backend
    logits = driver.step([(driver.add(prompt(20)), 20)], rows="all")
    rng = np.random.default_rng(0)
    batch = draws(
        60,
        rows=rng.integers(0, 20, 60).astype(np.int32),
        temperature=rng.uniform(0, 2, 60).astype(np.float32) * (rng.random(60) < 0.8),
        top_k=rng.integers(0, 9, 60).astype(np.int32),
        num_logprobs=rng.integers(-1, 4, 60).astype(np.int32),
        bias=Ragged(np.arange(61, dtype=np.int32), np.full(60, 7, np.int32), np.full(60, 2.0, np.float32)),
    )
    expected = sample(logits, batch)
    for elements in (1 << 24, 320 * 7, 1):  # all rows at once, a few, one by one
        monkeypatch.setattr("vllm.model_executor.backends.torch_backend._LOGITS_ELEMENTS", elements)
        actual = backend.sample(driver.hidden, batch)
        assert np.array_equal(actual.token_ids, expected.token_ids)
        assert np.array_equal(actual.logprobs.token_ids, expected.logprobs.token_ids)
        assert np.array_equal(actual.logprobs.logprobs, expected.logprobs.logprobs)
        assert np.array_equal(actual.logprobs.ranks, expected.logprobs.ranks)


def test_ten_thousand_draws_make_the_logits_of_their_row_once(monkeypatch):
    driver = Driver(backend_for())
    driver.prefill(driver.add(prompt(20)))
    made = []
    logits = TorchBackend.logits
    monkeypatch.setattr(
        TorchBackend, "logits", lambda self, hidden, rows: made.append(len(rows)) or logits(self, hidden, rows)
    )
    drawn = driver.backend.sample(driver.hidden, draws(10_000))
    assert made == [1]
    assert len(np.unique(drawn.token_ids)) > 20
    one = driver.backend.sample(driver.hidden, draws(1, seeds=np.array([1234], np.uint64)))
    assert one.token_ids[0] == drawn.token_ids[1234]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs"])
def test_token_logprobs(mode, monkeypatch):
    driver = Driver(backend_for())
    logits = driver.step([(driver.add(prompt(20)), 20)], rows="all")
    rows, targets = np.array([3, 0, 19, 3], np.int32), np.array([7, 300, 1, 8], np.int32)
    expected = token_logprobs(logits[rows], targets, 2, mode)
    for elements in (1 << 24, 320 * 3):
        monkeypatch.setattr("vllm.model_executor.backends.torch_backend._LOGITS_ELEMENTS", elements)
        actual = driver.backend.token_logprobs(driver.hidden, rows, targets, 2, mode)
        for field in ("offsets", "token_ids", "logprobs", "ranks"):
            assert np.array_equal(getattr(actual, field), getattr(expected, field))
    none = driver.backend.token_logprobs(driver.hidden, rows[:0], targets[:0], 2, mode)
    assert none.offsets.tolist() == [0]
    if mode == "raw_logprobs":
        own = actual.logprobs[actual.offsets[:-1]]
        np.testing.assert_allclose(own, log_softmax(logits)[rows, targets], atol=1e-5)


# Weights


def tensor(name, values):
    values = np.asarray(values, np.float32)
    return WeightTensor(name, values.shape, "float32", lambda: values)


def test_load_weights_names_what_is_wrong():
    spec = backend_for().spec
    backend = TorchBackend(spec, "float32")
    with pytest.raises(WeightError, match="'layers.9.q' is not a parameter of LlamaForCausalLM"):
        backend.load_weights([tensor("layers.9.q", np.zeros((64, 64)))])
    with pytest.raises(WeightError, match=r"'layers.1.q' has shape \(63, 64\), not \(64, 64\)"):
        backend.load_weights([tensor("layers.1.q", np.zeros((63, 64)))])
    with pytest.raises(WeightError, match=r"no weight fills embed, layers.0.input_norm, layers.0.k, .* and 15 more"):
        backend.load_weights([tensor("layers.0.q", np.zeros((64, 64)))])


def test_later_weights_replace_any_subset():
    backend = load()
    driver = Driver(backend)
    tokens = prompt(20)
    before = driver.prefill(driver.add(tokens))
    config = tiny_config("llama")
    other = random_weights(config, seed=1)
    checkpoint = open_checkpoint(tiny_folder("llama"))
    names = checkpoint.hf_name_map
    old = {weight.name: weight for weight in checkpoint.weights()}
    backend.load_weights([tensor(names[name].canonical, value) for name, value in other.items() if "layers.1" in name])
    changed = driver.prefill(driver.add(tokens))
    assert not np.array_equal(changed, before)
    backend.load_weights([old[name] for name in old if name.startswith("layers.1")])
    assert np.array_equal(driver.prefill(driver.add(tokens)), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_given_as_bits_rows_or_whole_are_the_same(dtype):
    spec = backend_for().spec
    checkpoint = open_checkpoint(tiny_folder("llama", "bfloat16"))
    weights = list(checkpoint.weights())
    results = []
    for keep in ("bf16_bits", "read_rows", None):
        given = [
            WeightTensor(
                weight.name,
                weight.shape,
                weight.dtype,
                weight.read,
                weight.bf16_bits if keep == "bf16_bits" else None,
                weight.read_rows if keep else None,
            )
            for weight in weights
        ]
        backend = TorchBackend(spec, dtype)
        backend.load_weights(given)
        driver = Driver(backend)
        results.append(driver.prefill(driver.add(prompt(20))))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_int8_is_the_rounded_weights():
    """Every matrix is kept as int8 with one scale per output; the same model in fp32 with those weights is the same."""
    backend = load(quantization="int8")
    with open_checkpoint(tiny_folder("llama")) as checkpoint:
        weights = {weight.name: weight.read() for weight in checkpoint.weights()}
    rounded = {}
    for name, value in weights.items():
        if value.ndim == 2:
            scale = np.abs(value).max(axis=1, keepdims=True) / np.float32(127)
            value = np.rint(value / scale).astype(np.float32) * scale
        rounded[name] = value
    expected = TorchBackend(backend.spec, "float32")
    expected.load_weights([tensor(name, value) for name, value in rounded.items()])
    tokens = prompt(40)
    logits = []
    for one in (backend, expected, backend_for()):
        driver = Driver(one)
        logits.append(log_softmax(driver.step([(driver.add(tokens), 40)], rows="all")))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
    assert 0 < np.abs(logits[0] - logits[2]).mean() < 0.05
    assert all(matrix.data.dtype == torch.int8 for matrix in backend._decoder.matrices.values())


def test_int8_of_a_row_of_zeros():
    backend = load(quantization="int8")
    backend.load_weights([tensor("layers.0.q", np.zeros((64, 64)))])
    driver = Driver(backend)
    assert np.isfinite(driver.prefill(driver.add(prompt(5)))).all()


def test_what_cannot_be_run_is_refused_by_name():
    spec = backend_for().spec
    with pytest.raises(UnsupportedSpecError, match="dtype float8"):
        TorchBackend(spec, "float8")
    with pytest.raises(UnsupportedSpecError, match="quantization 'fp4'"):
        TorchBackend(spec, "float32", quantization="fp4")
    assert TorchBackend.supports(spec, "float32") is None
    assert TorchBackend.is_available() is None
    from dataclasses import replace

    layer = spec.layers[0]
    for changed, reason in (
        (replace(layer, mixer=replace(layer.mixer, tag="mamba")), "mixer mamba"),
        (replace(layer, ffn=replace(layer.ffn, tag="experts")), "feed-forward part experts"),
        (replace(layer, ffn=replace(layer.ffn, activation="relu")), "activation relu"),
        (replace(layer, mixer=replace(layer.mixer, head_dim=64)), "rope over a part of the head"),
    ):
        assert reason in TorchBackend.supports(replace(spec, layers=(layer, changed)), "float32")

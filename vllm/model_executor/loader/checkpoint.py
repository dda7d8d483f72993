"""An open checkpoint: its description, and its weights by canonical name, decoded when they are read.

Three sources: a Hugging Face folder, a GGUF file, and `load_format="dummy"`, which invents the
weights of a config.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.exceptions import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedError, WeightError
from vllm.model_executor.backends.interface import Float32s, WeightTensor
from vllm.model_executor.loader.dequantize import FORMATS, bf16_to_fp32, dequantize, fp32_to_bf16
from vllm.model_executor.loader.gguf_config import gguf_config
from vllm.model_executor.loader.gguf_file import GGUFFile, GGUFTensor
from vllm.model_executor.loader.safetensors_file import SafeTensor, SafetensorsFile
from vllm.model_executor.models.family import Config, Family, WeightName
from vllm.model_executor.models.registry import family_of
from vllm.model_executor.spec import DecoderSpec

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
_GGUF_TYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Checkpoint:
    """What `open_checkpoint` returns. `close` gives the mapped files back once nothing views them."""

    path: Path
    format: str
    """"safetensors", "gguf" or "dummy"."""
    config: dict[str, Any]
    """In the shape of config.json, overrides applied; for a GGUF file made from its metadata."""
    generation_config: dict[str, Any]
    spec: DecoderSpec
    hf_name_map: dict[str, WeightName]
    """Every Hugging Face name of this model's weights, and the parameter it fills (q and k in Hugging Face's order)."""

    def __init__(
        self,
        path: Path,
        source_format: str,
        family: Family,
        config: dict[str, Any],
        generation_config: dict[str, Any],
    ) -> None:
        self.path = path
        self.format = source_format
        self.family = family
        self.config = config
        self.generation_config = generation_config
        self.spec = family.spec(Config(config, str(path)))
        self._shapes = self.spec.parameters()
        self.hf_name_map = family.hf_names(self.spec)
        self._weights: dict[str, WeightTensor] = {}
        self._files: list[GGUFFile | SafetensorsFile] = []

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a sequence, from generation_config.json and config.json, without repeats."""
        ids: list[int] = []
        for source in (self.generation_config, self.config):
            value = source.get("eos_token_id")
            for token in value if isinstance(value, list) else [value]:
                if type(token) is int and token not in ids:
                    ids.append(token)
        return ids

    @property
    def stored_dtype(self) -> str:
        """The dtype the weights are best run in: theirs, or bfloat16 where they are quantized."""
        dtype = self._weights["embed"].dtype
        return dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16"

    def weights(self) -> Iterator[WeightTensor]:
        """Every parameter of `spec`, in its order. Names and shapes were checked when the checkpoint was opened."""
        return iter([self._weights[name] for name in self.spec.parameters()])

    def close(self) -> None:
        self._weights = {}
        for file in self._files:
            file.close()
        self._files = []

    def __enter__(self) -> Checkpoint:  # noqa: PYI034 - Self is not in typing before 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(
    path: str | Path, load_format: str = "auto", hf_overrides: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file, or (dummy) a folder with a config.json or that file itself.

    Reads headers only. Raises `ModelLoadError`: `CheckpointError` for a missing, truncated or corrupt file,
    `WeightError` for a weight nobody took, a parameter nobody filled or a wrong shape, `UnknownArchitectureError`.
    """
    path = Path(path)
    overrides = dict(hf_overrides or {})
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {load_format!r}", "load_format")
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    is_gguf = path.is_file() and path.suffix != ".json"
    if load_format == "dummy":
        return _open_dummy(path, overrides, is_gguf)
    if is_gguf:
        if load_format == "safetensors":
            raise ConfigError(f"load_format is safetensors, but {path} is a file, not a folder", "load_format")
        return _open_gguf(path, overrides)
    if load_format == "gguf":
        raise ConfigError(f"load_format is gguf, but {path} is not a GGUF file", "load_format")
    if path.is_file():
        raise CheckpointError(f"{path}: a config alone has no weights; load_format='dummy' invents them")
    return _open_folder(path, overrides)


# Hugging Face folder


def _read_json(path: Path, required: bool = True) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not required:
            return {}
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _hf_config(path: Path, overrides: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    config = _read_json(path) | overrides
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise UnsupportedError(
            f"{path}: the checkpoint is quantized ({method}); GGUF is the quantized format read here"
        )
    return family_of(config.get("architectures"), config.get("model_type"), str(path)), config


def _open_folder(folder: Path, overrides: dict[str, Any]) -> Checkpoint:
    family, config = _hf_config(folder / "config.json", overrides)
    generation = _read_json(folder / "generation_config.json", required=False)
    checkpoint = Checkpoint(folder, "safetensors", family, config, generation)
    try:
        for shard, names in _shards(folder).items():
            if not shard.is_file():
                raise CheckpointError(f"{shard}: missing (shard of a checkpoint in several files)")
            file = SafetensorsFile(shard)
            checkpoint._files.append(file)
            absent = sorted(names - file.tensors.keys())
            if absent:
                raise WeightError(f"{shard} lacks {_some(absent)}, which the index says it has")
            for name, tensor in file.tensors.items():
                _take_safetensor(checkpoint, file, name, tensor)
        _require_all(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _shards(folder: Path) -> dict[Path, set[str]]:
    """The folder's safetensors files, each with the names that the index expects in it (none without an index)."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path}: weight_map is missing or not an object")
        shards: dict[Path, set[str]] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name or file_name in ("", ".", ".."):
                raise CheckpointError(f"{index_path}: {file_name!r} is not a file name")
            shards.setdefault(folder / file_name, set()).add(name)
        return shards
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise CheckpointError(
                f"{folder}: has pickled weights only; convert them to safetensors (pickles are not read)"
            )
        raise CheckpointError(f"{folder}: has no safetensors file")
    return {file: set() for file in files}


def _take_safetensor(checkpoint: Checkpoint, file: SafetensorsFile, name: str, tensor: SafeTensor) -> None:
    target = checkpoint.hf_name_map.get(name)
    if target is None:
        if name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and checkpoint.spec.tie_word_embeddings):
            return
        raise WeightError(f"{file.path}: weight {name!r} is not part of {checkpoint.spec.architecture}")

    def read_rows(start: int, stop: int) -> Float32s:
        part = file.data(tensor)[start:stop]
        values = bf16_to_fp32(part) if tensor.dtype == "bfloat16" else np.ascontiguousarray(part, np.float32)
        return values + np.float32(1.0) if target.add_one else values

    bits = None
    if tensor.dtype == "bfloat16" and not target.add_one:
        bits = partial(_bits, file, tensor)
    weight = WeightTensor(
        name=target.canonical,
        shape=tensor.shape,
        dtype=tensor.dtype,
        read=partial(read_rows, 0, tensor.shape[0] if tensor.shape else 0),
        bf16_bits=bits,
        read_rows=read_rows,
    )
    _take(checkpoint, weight, f"{file.path}: weight {name!r}")


def _bits(file: SafetensorsFile, tensor: SafeTensor) -> npt.NDArray[np.uint16]:
    return file.data(tensor)


# GGUF file


def _open_gguf(path: Path, overrides: dict[str, Any]) -> Checkpoint:
    file = GGUFFile(path)
    try:
        family, config = gguf_config(file)
        checkpoint = Checkpoint(path, "gguf", family, config | overrides, {})
        checkpoint._files.append(file)
        names = family.gguf_names(checkpoint.spec)
        for name, tensor in file.tensors.items():
            target = names.get(name)
            if target is not None:
                _take_gguf_tensor(checkpoint, file, tensor, target)
            elif name != "rope_freqs.weight":
                raise WeightError(f"{path}: weight {name!r} is not part of {checkpoint.spec.architecture}")
        _require_all(checkpoint)
    except BaseException:
        file.close()
        raise
    return checkpoint


def _take_gguf_tensor(checkpoint: Checkpoint, file: GGUFFile, tensor: GGUFTensor, target: WeightName) -> None:
    shape, rows, order = tensor.shape, tensor.shape[0], None
    encoded = file.data(tensor).reshape(rows, -1)
    short_name = target.canonical.rsplit(".", 1)[-1]
    if checkpoint.family.gguf_interleaved_rope and short_name in ("q", "k", "q_bias", "k_bias"):
        mixer = checkpoint.spec.layers[int(target.canonical.split(".")[1])].mixer
        heads = mixer.num_heads if short_name[0] == "q" else mixer.num_kv_heads
        if rows == heads * mixer.head_dim:
            order = _half_split_order(heads, mixer.head_dim)
            if len(shape) == 1:
                encoded = encoded.reshape(rows, -1)

    def raw() -> npt.NDArray[np.uint8]:
        return encoded if order is None else encoded[order]

    def read_rows(start: int, stop: int) -> Float32s:
        part = encoded[start:stop] if order is None else encoded[order[start:stop]]
        return dequantize(part.reshape(-1), tensor.type_name, (len(part), *shape[1:]))

    weight = WeightTensor(
        name=target.canonical,
        shape=shape,
        dtype=_GGUF_TYPE_NAMES.get(tensor.type_name, tensor.type_name),
        read=partial(read_rows, 0, rows),
        bf16_bits=(lambda: raw().view(np.uint16).reshape(shape)) if tensor.type_name == "BF16" else None,
        read_rows=read_rows,
        raw=raw if tensor.type_name not in _GGUF_TYPE_NAMES else None,
    )
    assert tensor.type_name in FORMATS
    _take(checkpoint, weight, f"{file.path}: weight {tensor.name!r}")


def _half_split_order(heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Row order that turns GGUF's interleaved rows of q or k (x0 x1 of each pair side by side) into the half-split
    layout (all x0, then all x1) of each head."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


# Invented weights


_DUMMY_BLOCK = 1_048_583  # a prime, so that rows of a matrix are not repeats of each other
_DUMMY_DEVIATION = 0.02


def _open_dummy(path: Path, overrides: dict[str, Any], is_gguf: bool) -> Checkpoint:
    """Random weights, cheap to make for models of any size; norms are one.

    Deterministic: a normal block of fixed seed, read from a place that depends on the parameter's name."""
    generation: dict[str, Any] = {}
    if is_gguf:
        file = GGUFFile(path)
        family, config = gguf_config(file)
        file.close()
        config |= overrides
    elif path.is_dir():
        family, config = _hf_config(path / "config.json", overrides)
        generation = _read_json(path / "generation_config.json", required=False)
    else:
        family, config = _hf_config(path, overrides)
    checkpoint = Checkpoint(path, "dummy", family, config, generation)
    block: list[npt.NDArray[np.uint16]] = []

    def bits(name: str, shape: tuple[int, ...], start: int, stop: int) -> npt.NDArray[np.uint16]:
        if not block:
            normal = np.random.Generator(np.random.PCG64(0)).standard_normal(_DUMMY_BLOCK, np.float32)
            block.append(fp32_to_bf16(normal * np.float32(_DUMMY_DEVIATION)))
        row_size = int(np.prod(shape[1:], dtype=np.int64))
        seed = sum((index + 1) * byte for index, byte in enumerate(name.encode())) * 7919
        first, count = (seed + start * row_size) % _DUMMY_BLOCK, (stop - start) * row_size
        repeats = -(-(first + count) // _DUMMY_BLOCK)
        return np.tile(block[0], repeats)[first : first + count].reshape(stop - start, *shape[1:])

    def read_rows(name: str, shape: tuple[int, ...], start: int, stop: int) -> Float32s:
        if name.endswith("norm"):
            return np.ones(stop - start, np.float32)
        return bf16_to_fp32(bits(name, shape, start, stop))

    for name, shape in checkpoint.spec.parameters().items():
        checkpoint._weights[name] = WeightTensor(
            name=name,
            shape=shape,
            dtype="bfloat16",
            read=partial(read_rows, name, shape, 0, shape[0]),
            bf16_bits=None if name.endswith("norm") else partial(bits, name, shape, 0, shape[0]),
            read_rows=partial(read_rows, name, shape),
        )
    return checkpoint


# Checks


def _take(checkpoint: Checkpoint, weight: WeightTensor, where: str) -> None:
    expected = checkpoint._shapes[weight.name]
    if tuple(weight.shape) != expected:
        raise WeightError(f"{where} has shape {tuple(weight.shape)}, {checkpoint.spec.architecture} needs {expected}")
    if weight.name in checkpoint._weights:
        raise WeightError(f"{where} occurs twice")
    checkpoint._weights[weight.name] = weight


def _require_all(checkpoint: Checkpoint) -> None:
    missing = [name for name in checkpoint.spec.parameters() if name not in checkpoint._weights]
    if missing:
        names = {target.canonical: name for name, target in checkpoint.hf_name_map.items()}
        asked = missing if checkpoint.format == "gguf" else [names[name] for name in missing]
        raise WeightError(f"{checkpoint.path}: no weight fills {_some(asked)} of {checkpoint.spec.architecture}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

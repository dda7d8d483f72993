"""Rotary embedding: from a checkpoint's parameters to inverse frequencies, with the scaling applied.

Sources: linear - Chen et al. 2023 (arXiv 2306.15595); yarn - Peng et al. 2023 (arXiv 2309.00071); llama3 - the Llama
3.1 release. Computed in fp64, rounded to fp32 once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.exceptions import UnsupportedError
from vllm.model_executor.models.family import Config
from vllm.model_executor.spec import RopeSpec

KINDS = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0


def rope_parameters(config: Config, layer_type: str | None = None) -> dict[str, Any]:
    """The rope parameters as a flat dict, from either style of config: `rope_parameters` (flat, or one dict per layer
    type), or the older `rope_theta` beside `rope_scaling`."""
    parameters = config.get("rope_parameters")
    if parameters is not None:
        if not isinstance(parameters, Mapping):
            raise config.fail(f"rope_parameters must be an object, not {parameters!r}")
        nested = parameters.get(layer_type) if layer_type else None
        flat = dict(parameters if nested is None else nested)
    else:
        scaling = config.get("rope_scaling")
        if scaling is not None and not isinstance(scaling, Mapping):
            raise config.fail(f"rope_scaling must be an object, not {scaling!r}")
        flat = dict(scaling or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if flat.get(key) is None and config.get(key) is not None:
            flat[key] = config.get(key)
    return flat


def rope_spec(parameters: Mapping[str, Any], head_dim: int, max_position: int, source: str) -> RopeSpec:
    """Inverse frequencies [head_dim / 2] after scaling.

    Raises `UnsupportedError` naming a kind of scaling that is not known, `CheckpointError` naming what is malformed.
    """
    rope = Config(parameters, source=f"{source}: rope parameters")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(f"{source}: partial_rotary_factor {rope.get('partial_rotary_factor')} is not supported")
    theta = rope.number("rope_theta", DEFAULT_THETA)
    inv_freq = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    attention_factor = 1.0
    if kind == "linear":
        inv_freq /= rope.number("factor")
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif kind == "yarn":
        inv_freq, attention_factor = _yarn(inv_freq, rope, theta, max_position)
    elif kind != "default":
        raise UnsupportedError(f"{source}: rope scaling {kind!r} is not supported; these are: {', '.join(KINDS)}")
    divisors = rope.get("divisors")
    if divisors is not None:
        inv_freq = inv_freq / _divisors(divisors, len(inv_freq), rope)
    with np.errstate(over="ignore"):
        rounded = inv_freq.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise rope.fail("they give frequencies that fp32 cannot hold")
    return RopeSpec(tuple(rounded.tolist()), attention_factor)


def max_position(config: Config) -> int:
    """`max_position_embeddings`, or what a yarn scaling stretches the original length to."""
    longest = config.integer("max_position_embeddings", 2048)
    parameters = Config(rope_parameters(config), config.source)
    if (parameters.get("rope_type") or parameters.get("type")) == "yarn":
        original = parameters.integer("original_max_position_embeddings", longest)
        return max(longest, int(original * parameters.number("factor")))
    return longest


def _llama3(inv_freq: npt.NDArray[np.float64], rope: Config) -> npt.NDArray[np.float64]:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.fail(f"low_freq_factor {low} must be below high_freq_factor {high}")
    turns = rope.integer("original_max_position_embeddings") * inv_freq / (2 * math.pi)  # within the original length
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _yarn(
    inv_freq: npt.NDArray[np.float64], rope: Config, theta: float, max_position: int
) -> tuple[npt.NDArray[np.float64], float]:
    factor, half = rope.number("factor"), len(inv_freq)
    if theta <= 1:
        raise rope.fail(f"rope_theta {theta} with yarn; it must be above 1")
    original = rope.integer("original_max_position_embeddings", max_position)

    def dimension(rotations: float) -> float:
        """The dimension pair that turns this many times within the original length."""
        return half * math.log(original / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(rope.number("beta_fast", 32.0)), dimension(rope.number("beta_slow", 1.0))
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled = inv_freq / factor * ramp + inv_freq * (1 - ramp)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        if mscale and mscale_all:
            attention_factor = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
        else:
            attention_factor = magnitude(1.0)
    return scaled, attention_factor


def _divisors(divisors: Any, half: int, rope: Config) -> npt.NDArray[np.float64]:
    """A divisor per frequency, as a GGUF file carries llama3 scaling (tensor `rope_freqs.weight`)."""
    array = np.asarray(divisors, np.float64)
    if array.shape != (half,) or not np.isfinite(array).all() or (array <= 0).any():
        raise rope.fail(f"rope_freqs must be {half} positive numbers, found shape {array.shape}")
    return array

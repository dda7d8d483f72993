"""Backends: each runs every `DecoderSpec` it can on one device, behind `interface.Backend`.

To add one: a file beside this with a class like `TorchBackend`, and an entry in `_BACKENDS`.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm.config import DeviceConfig
from vllm.exceptions import BackendUnavailableError, ConfigError, UnsupportedSpecError
from vllm.logger import init_logger, warn_once
from vllm.model_executor.backends.interface import Backend
from vllm.model_executor.spec import DecoderSpec

logger = init_logger(__name__)

_BACKENDS = {
    "cpu": ("vllm.model_executor.backends.cpu_backend", "CpuBackend"),
    "torch": ("vllm.model_executor.backends.torch_backend", "TorchBackend"),
    "triton": ("vllm.model_executor.backends.triton_backend", "TritonBackend"),
}
_REMEDIES = (
    "build the CPU kernels (install a C++ compiler and run `pip install --force-reinstall --no-deps .` in the sources) "
    "or install the torch reference backend (`pip install torch`)"
)


def create_backend(
    name: str,
    spec: DecoderSpec,
    dtype: str,
    device_config: DeviceConfig | None = None,
    quantization: str | None = None,
) -> Backend:
    """The backend called `name` ("cpu", "torch", "triton"), or with "auto" the fastest that runs `spec` on the device.

    Raises `BackendUnavailableError` naming the remedies, `UnsupportedSpecError` naming what the chosen backend cannot
    run, `ConfigError` for an unknown name.
    """
    device_config = device_config or DeviceConfig()
    if name == "auto":
        return _create_auto(spec, dtype, device_config, quantization)
    if name not in _BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; these are known: auto, {', '.join(_BACKENDS)}", "backend")
    backend, reason = _find(name)
    if backend is None:
        raise BackendUnavailableError(f"the {name} backend is not available: {reason}; {_REMEDIES}")
    reason = backend.supports(spec, dtype, quantization)
    if reason is not None:
        raise UnsupportedSpecError(f"the {name} backend cannot run this model: {reason}")
    return _make(backend, spec, dtype, device_config, quantization)


def _create_auto(spec: DecoderSpec, dtype: str, device_config: DeviceConfig, quantization: str | None) -> Backend:
    reasons: list[str] = []
    candidates = ("cpu", "torch") if device_config.device == "cpu" else ("triton", "torch")
    for name in candidates:
        backend, reason = _find(name)
        if backend is not None:
            reason = backend.supports(spec, dtype, quantization)
            if reason is None:
                if reasons:
                    warn_once(logger, "Using the torch reference backend, which is slow (%s).", "; ".join(reasons))
                return _make(backend, spec, dtype, device_config, quantization)
            reason = f"cannot run this model: {reason}"
        reasons.append(f"{name} backend: {reason}")
    raise BackendUnavailableError(f"no backend can run here ({'; '.join(reasons)}): {_REMEDIES}")


def _find(name: str) -> tuple[Any, str | None]:
    """The backend's class, or None and why it cannot be used here."""
    module, attribute = _BACKENDS[name]
    try:
        backend = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        return None, f"it cannot be imported ({error})"
    reason = backend.is_available()
    return (None, reason) if reason is not None else (backend, None)


def _make(
    backend: Any, spec: DecoderSpec, dtype: str, device_config: DeviceConfig, quantization: str | None
) -> Backend:
    made: Backend = backend(spec, dtype, device_config, quantization)
    return made

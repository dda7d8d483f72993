"""Which backend is made: by name, and by itself; what is said when none can be."""

from __future__ import annotations

import logging
import subprocess
import sys
import types

import pytest

from tests.models_util import tiny_folder
from vllm.config import DeviceConfig
from vllm.exceptions import BackendUnavailableError, ConfigError, UnsupportedSpecError
from vllm.model_executor import backends
from vllm.model_executor.backends import create_backend
from vllm.model_executor.loader import open_checkpoint

CPU, TORCH = backends._BACKENDS["cpu"][0], backends._BACKENDS["torch"][0]


@pytest.fixture(scope="module")
def spec():
    with open_checkpoint(tiny_folder("llama")) as checkpoint:
        return checkpoint.spec


def fake(monkeypatch, module, available=None, supported=None):
    """Puts a backend in the place of a module."""

    class Fake:
        name = module.rsplit(".", 1)[-1]

        def __init__(self, *arguments):
            self.arguments = arguments

        @staticmethod
        def is_available():
            return available

        @staticmethod
        def supports(spec, dtype, quantization):
            return supported

    replacement = types.ModuleType(module)
    replacement.CpuBackend = replacement.TorchBackend = Fake
    monkeypatch.setitem(sys.modules, module, replacement)


def absent(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)


def test_auto_takes_the_kernels(monkeypatch, spec):
    fake(monkeypatch, CPU)
    absent(monkeypatch, TORCH)
    device = DeviceConfig(num_threads=3)
    made = create_backend("auto", spec, "bfloat16", device, "int8")
    assert made.name == "cpu_backend"
    assert made.arguments == (spec, "bfloat16", device, "int8")


@pytest.mark.parametrize("reason", ["absent", "unavailable", "unsupported"])
def test_auto_falls_back_to_torch_with_one_warning(monkeypatch, spec, reason, log, fresh_warnings):
    if reason == "absent":
        absent(monkeypatch, CPU)
    else:
        fake(
            monkeypatch,
            CPU,
            available="no library was built" if reason == "unavailable" else None,
            supported="dtype float16" if reason == "unsupported" else None,
        )
    fake(monkeypatch, TORCH)
    with log.at_level(logging.WARNING):
        for _ in range(3):
            assert create_backend("auto", spec, "float32").name == "torch_backend"
    said = [record.getMessage() for record in log.records if "reference backend" in record.getMessage()]
    assert len(said) == 1
    expected = {"absent": "cannot be imported", "unavailable": "no library was built", "unsupported": "dtype float16"}
    assert expected[reason] in said[0]


def test_neither_names_both_remedies(monkeypatch, spec):
    fake(monkeypatch, CPU, available="no library was built")
    absent(monkeypatch, TORCH)
    with pytest.raises(BackendUnavailableError, match=r"no library was built.*C\+\+ compiler.*pip install torch"):
        create_backend("auto", spec, "float32")
    with pytest.raises(BackendUnavailableError, match=r"torch backend is not available.*compiler.*pip install torch"):
        create_backend("torch", spec, "float32")
    with pytest.raises(BackendUnavailableError, match="cpu backend is not available: no library was built"):
        create_backend("cpu", spec, "float32")


def test_a_named_backend_refuses_by_name(monkeypatch, spec):
    fake(monkeypatch, CPU, supported="mixer mamba")
    with pytest.raises(UnsupportedSpecError, match="the cpu backend cannot run this model: mixer mamba"):
        create_backend("cpu", spec, "float32")
    with pytest.raises(ConfigError, match="unknown backend 'tpu'; these are known: auto, cpu, torch, triton"):
        create_backend("tpu", spec, "float32")


def test_torch_by_name(spec):
    pytest.importorskip("torch")
    assert create_backend("torch", spec, "float32").name == "torch"


def test_the_registry_itself_loads_no_torch():
    code = "import sys, vllm.model_executor.backends; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

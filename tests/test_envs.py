"""Environment variables: read when asked for, checked, listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm import envs
from vllm.exceptions import ConfigError


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert envs.VLLM_CACHE_ROOT == "/some/where/vllm"
    assert envs.VLLM_ENABLE_V1_MULTIPROCESSING is False
    assert envs.VLLM_CPU_ISA is None
    assert envs.VLLM_CPU_NUM_THREADS is None
    assert envs.VLLM_LOGGING_LEVEL == "INFO"
    assert envs.VLLM_USE_V1 is True
    assert not envs.is_set("VLLM_ENABLE_V1_MULTIPROCESSING")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert Path("/home/someone/.cache/vllm") == Path(envs.VLLM_CACHE_ROOT)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("0", False), ("true", True), ("Off", False), ("", False)])
def test_read_at_each_look(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", text)
    assert envs.VLLM_ENABLE_V1_MULTIPROCESSING is value
    assert envs.is_set("VLLM_ENABLE_V1_MULTIPROCESSING") is bool(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "2"),
        ("VLLM_CPU_NUM_THREADS", "0"),
        ("VLLM_CPU_NUM_THREADS", "many"),
        ("VLLM_CPU_KVCACHE_SPACE", "-1"),
        ("VLLM_CPU_KVCACHE_SPACE", "nan"),
        ("VLLM_CPU_KVCACHE_SPACE", "inf"),
        ("VLLM_LOGGING_LEVEL", "LOUD"),
    ],
)
def test_a_bad_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=name) as caught:
        getattr(envs, name)
    assert repr(text) in str(caught.value)
    assert caught.value.parameter == name


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_NUM_THREADS", "3")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    monkeypatch.setenv("VLLM_CPU_ISA", " AVX2 ")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert (envs.VLLM_CPU_NUM_THREADS, envs.VLLM_CPU_KVCACHE_SPACE) == (3, 0.5)
    assert (envs.VLLM_CPU_ISA, envs.VLLM_LOGGING_LEVEL) == ("avx2", "DEBUG")


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_NUM_THREDS", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert "VLLM_CPU_NUM_THREDS" in envs.unknown()
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in envs.unknown()
    with pytest.raises(AttributeError):
        _ = envs.VLLM_NO_SUCH  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        envs.is_set("VLLM_NO_SUCH")


def test_every_variable_is_annotated_and_described() -> None:
    source = Path(envs.__file__).read_text()
    for name, text in envs.describe().items():
        assert text.endswith(".")
        assert f"    {name}: " in source
        assert name in dir(envs)

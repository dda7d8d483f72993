"""Set-up shared by all tests: no network, one thread per process, a cache of their own, and the bundled models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before anything imports numpy, torch or transformers, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # processes that share the cores must not spin against each other
    os.environ.setdefault("VLLM_CPU_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():  # Triton's kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(__file__).resolve().parent.parent / ".cache" / "tests"))

import hypothesis
import pytest

# No deadlines: a busy machine must not fail a test. CI draws the same examples each time; a developer's runs explore.
hypothesis.settings.register_profile("local", deadline=None, max_examples=60)
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("local"), derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    from vllm.model_executor.loader import resolve_model

    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The GGUF file of Gemma 3 270M."""
    from vllm.model_executor.loader import resolve_model

    return resolve_model("gemma3-270m")


@pytest.fixture
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `warn_once` has said before counts as unsaid within the test."""
    from vllm import logger

    monkeypatch.setattr(logger, "_said", set())


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """`caplog` that also sees the project's own loggers, which do not propagate to the root."""
    import logging

    from vllm.logger import init_logger

    init_logger("vllm")  # sets `propagate`, once
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


@pytest.fixture(scope="session")
def require_backend() -> Callable[[str], None]:
    """Skips the test, saying why, where a backend cannot run: the CPU kernels need a compiler."""

    def check(name: str) -> None:
        from vllm.model_executor.backends.cpu_backend import CpuBackend

        reason = CpuBackend.is_available() if name == "cpu" else None
        if reason is not None:
            pytest.skip(reason)

    return check

"""n completions of one prompt, served fast: an independent engine behind vLLM's Python API.

This is not the vLLM project's own code; it takes the place of that package in an environment (see README.md).

Names are loaded when they are first used (PEP 562): `import vllm` alone costs milliseconds and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm.version import __version__, __version_tuple__

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
    from vllm.engine.arg_utils import EngineArgs as EngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from vllm.engine.llm_engine import LLMEngine as LLMEngine
    from vllm.entrypoints.llm import LLM as LLM
    from vllm.inputs import PromptType as PromptType
    from vllm.inputs import TextPrompt as TextPrompt
    from vllm.inputs import TokensPrompt as TokensPrompt
    from vllm.outputs import CompletionOutput as CompletionOutput
    from vllm.outputs import RequestOutput as RequestOutput
    from vllm.sampling_params import SamplingParams as SamplingParams

_MODULE_OF = {
    "LLM": "vllm.entrypoints.llm",
    "SamplingParams": "vllm.sampling_params",
    "RequestOutput": "vllm.outputs",
    "CompletionOutput": "vllm.outputs",
    "TextPrompt": "vllm.inputs",
    "TokensPrompt": "vllm.inputs",
    "PromptType": "vllm.inputs",
    "EngineArgs": "vllm.engine.arg_utils",
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "LLMEngine": "vllm.engine.llm_engine",
    "AsyncLLMEngine": "vllm.engine.async_llm_engine",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})

"""The path under which openrlhf and lighteval import the asynchronous engine."""

from vllm.v1.engine.async_llm import AsyncLLM

AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncLLMEngine"]

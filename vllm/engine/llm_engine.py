"""The path under which trl, openrlhf and llama-index import the synchronous engine."""

from vllm.v1.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]

"""The families this project knows. A new one is a file beside this and an entry here."""

from __future__ import annotations

from vllm.exceptions import UnknownArchitectureError
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.gemma3 import GEMMA3
from vllm.model_executor.models.llama import LLAMA, MISTRAL
from vllm.model_executor.models.qwen2 import QWEN2
from vllm.model_executor.models.qwen3 import QWEN3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3)


def known_architectures() -> list[str]:
    return [name for family in FAMILIES for name in family.architectures]


def family_of(architectures: object, model_type: object, source: str) -> Family:
    """The family of config.json's `architectures` or, where it names none, of its `model_type`.

    Raises `UnknownArchitectureError` listing the known ones."""
    names = architectures if isinstance(architectures, list) else []
    for family in FAMILIES:
        if any(name in family.architectures for name in names) or (not names and model_type == family.model_type):
            return family
    asked = ", ".join(map(str, names)) or (f"of model_type {model_type!r}" if model_type else "not named")
    raise UnknownArchitectureError(
        f"{source}: architecture {asked}; these are known: {', '.join(known_architectures())}"
    )


def family_of_gguf(architecture: object, source: str) -> Family:
    """The family of a GGUF file's `general.architecture`."""
    known = {family.gguf_architecture: family for family in FAMILIES if family.gguf_architecture is not None}
    if isinstance(architecture, str) and architecture in known:
        return known[architecture]
    raise UnknownArchitectureError(f"{source}: GGUF architecture {architecture!r}; these are known: {', '.join(known)}")

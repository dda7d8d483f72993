"""Which LoRA adapter a request asks for."""

from __future__ import annotations

import msgspec

from vllm.exceptions import BadRequestError


class LoRARequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter by name, with the id (≥ 1) that is unique among the adapters of one engine."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise BadRequestError(f"lora_name must be a non-empty string, got {self.lora_name!r}", "lora_name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise BadRequestError(f"lora_int_id must be an int of at least 1, got {self.lora_int_id!r}", "lora_int_id")
        if not isinstance(self.lora_path, str):
            raise BadRequestError(f"lora_path must be a string, got {self.lora_path!r}", "lora_path")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

"""LoRARequest."""

from __future__ import annotations

import msgspec
import pytest

from vllm.exceptions import BadRequestError
from vllm.lora.request import LoRARequest


def test_as_programs_make_it() -> None:
    request = LoRARequest("adapter", 1, "/some/path")
    assert (request.name, request.adapter_id, request.path) == ("adapter", 1, "/some/path")
    assert request == LoRARequest(lora_name="adapter", lora_int_id=1, lora_path="/some/path")
    assert hash(request) == hash(LoRARequest("adapter", 1, "/some/path"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=LoRARequest) == request


@pytest.mark.parametrize(
    ("args", "parameter"),
    [
        (("", 1), "lora_name"),
        ((5, 1), "lora_name"),
        (("a", 0), "lora_int_id"),
        (("a", True), "lora_int_id"),
        (("a", "1"), "lora_int_id"),
        (("a", 1, None), "lora_path"),
    ],
)
def test_refused(args: tuple[object, ...], parameter: str) -> None:
    with pytest.raises(BadRequestError, match=parameter) as caught:
        LoRARequest(*args)  # type: ignore[arg-type]
    assert caught.value.parameter == parameter

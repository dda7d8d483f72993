"""Small helpers without a better home."""

from __future__ import annotations

import uuid

from vllm.utils.network_utils import get_ip, get_open_port

__all__ = ["get_ip", "get_open_port", "random_uuid"]


def random_uuid() -> str:
    """32 hexadecimal digits, new each time."""
    return uuid.uuid4().hex

"""Addresses and ports."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from vllm.utils import random_uuid
from vllm.utils.network_utils import get_ip, get_open_port


def test_an_open_port_can_be_bound() -> None:
    port = get_open_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    ipaddress.ip_address(get_ip())
    monkeypatch.setenv("VLLM_HOST_IP", "198.51.100.7")
    assert get_ip() == "198.51.100.7"


def test_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError("network is unreachable")

    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    monkeypatch.setattr(socket, "socket", Unreachable)
    assert get_ip() == "127.0.0.1"


def test_random_uuid() -> None:
    ids = {random_uuid() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)

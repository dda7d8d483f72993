"""Addresses and ports of this machine."""

from __future__ import annotations

import socket

from vllm import envs


def get_ip() -> str:
    """The address under which other machines reach this one: VLLM_HOST_IP, or that of the default route's interface.

    Falls back to the loopback address where there is no network. Nothing is sent.
    """
    if envs.VLLM_HOST_IP:
        return envs.VLLM_HOST_IP
    # Connecting a datagram socket only looks the route up. The addresses are reserved for examples (RFC 5737, 3849).
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def get_open_port() -> int:
    """A TCP port that is free now (another program may take it before the caller binds it)."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.bind((host, 0))
                return int(listener.getsockname()[1])
        except OSError:
            continue
    raise OSError("no free TCP port on the loopback interface")

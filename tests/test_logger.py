"""Logging."""

from __future__ import annotations

import logging

import pytest

from vllm import logger
from vllm.logger import init_logger, warn_once


def test_warn_once(fresh_warnings: None, log: pytest.LogCaptureFixture) -> None:
    mine = init_logger("vllm.test")
    for value in (1, 1, 2):
        warn_once(mine, "value %s", value)
    assert [record.message for record in log.records] == ["value 1", "value 2"]


def test_one_handler_that_follows_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    init_logger("vllm.a")
    init_logger("vllm.b").warning("hello")
    assert capsys.readouterr().err.count("hello") == 1
    assert logging.getLogger("vllm.b").handlers == []


def test_configuration_can_be_left_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "_configured", False)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    init_logger("vllm.c")
    assert root.handlers == []

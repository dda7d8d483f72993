"""Logging: `init_logger(__name__)` in every module, one handler on the `vllm` logger, to stderr.

`VLLM_LOGGING_LEVEL` sets the level; `VLLM_CONFIGURE_LOGGING=0` leaves the handler to the program.
"""

from __future__ import annotations

import logging
import sys
import threading

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"

_lock = threading.Lock()
_configured = False
_said: set[tuple[str, str]] = set()


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks `sys.stderr` up at each record, so that a replaced stream (a test's, a notebook's) is followed."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr


def _configure() -> None:
    global _configured
    with _lock:
        if _configured:
            return
        _configured = True
        if not envs.VLLM_CONFIGURE_LOGGING:
            return
        root = logging.getLogger("vllm")
        root.setLevel(envs.VLLM_LOGGING_LEVEL)
        if not root.handlers:
            handler = _StderrHandler()
            handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
            root.addHandler(handler)
            root.propagate = False


def init_logger(name: str) -> logging.Logger:
    """The logger of one module; sets the project's handler up on first use."""
    _configure()
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a warning the first time this message (with these arguments) comes from this logger."""
    key = (logger.name, message % args if args else message)
    with _lock:
        if key in _said:
            return
        _said.add(key)
    logger.warning(message, *args)

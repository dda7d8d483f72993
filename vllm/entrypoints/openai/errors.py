"""How refusals and failures look over HTTP: OpenAI's error object, and nothing about this machine."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from vllm.exceptions import (
    BadRequestError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineGenerateError,
    QueueFullError,
    UnsupportedError,
    VLLMError,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

CLIENT_GONE = 499
"""Status in the log of a request whose client went away; nobody reads it."""
RETRY_AFTER = 1
"""Seconds a client is asked to wait when the queue is full."""

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

STRUCTURED = "structured_outputs"
"""An engine's complaint about a request that has this name in it is about the constraint that the client gave."""


class HTTPError(VLLMError):
    """An answer that is not 200."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = headers


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(error: HTTPError) -> Response:
    return Response(
        msgspec.json.encode(error_object(error.status, str(error), error.param)),
        error.status,
        error.headers,
        "application/json",
    )


def as_http_error(error: Exception) -> HTTPError:
    """What a caller is told of an exception. What is not the caller's to mend is logged here, and not told."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, BadRequestError):
        return HTTPError(400, str(error), error.parameter)
    if isinstance(error, ConfigError):
        return HTTPError(400, str(error), error.parameter)
    if isinstance(error, UnsupportedError):
        return HTTPError(400, str(error))
    if isinstance(error, QueueFullError):
        return HTTPError(503, str(error), headers={"Retry-After": str(RETRY_AFTER)})
    if isinstance(error, EngineDeadError):
        return HTTPError(503, "the engine has stopped; nothing can be generated at the moment", headers=retry_later())
    if isinstance(error, EngineGenerateError):
        _, found, cause = str(error).partition(STRUCTURED + ": ")
        if found:
            return HTTPError(400, found + cause, STRUCTURED)
        logger.error("a request failed inside the engine: %s", error)
        return HTTPError(500, "the request failed inside the engine")
    if isinstance(error, EngineError):  # asleep, or busy where it must be idle
        return HTTPError(503, str(error), headers=retry_later())
    logger.error("unexpected error", exc_info=error)
    return HTTPError(500, "internal error")


def retry_later() -> dict[str, str]:
    return {"Retry-After": str(RETRY_AFTER)}

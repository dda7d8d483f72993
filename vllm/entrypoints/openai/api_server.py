"""The application: routes, errors, and what stands around them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from vllm import envs
from vllm.entrypoints.openai.chat import create_chat_completion, render_chat
from vllm.entrypoints.openai.completions import create_completion
from vllm.entrypoints.openai.errors import CLIENT_GONE, HTTPError, as_http_error, error_response
from vllm.entrypoints.openai.http_io import json_response, read_json
from vllm.entrypoints.openai.middleware import ApiKey, Gate, RequestId
from vllm.entrypoints.openai.protocol import (
    AbortBody,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read_body,
)
from vllm.entrypoints.openai.service import EngineService
from vllm.entrypoints.openai.tools import read_tools
from vllm.exceptions import BadRequestError, IntegrityError
from vllm.logger import init_logger
from vllm.v1.metrics.prometheus import CONTENT_TYPE, exposition
from vllm.version import __version__

logger = init_logger(__name__)

Handler = Callable[[EngineService, Request], Awaitable[Response]]


# ---- state of the server


async def health(service: EngineService, _: Request) -> Response:
    """200 while the engine lives, else 503."""
    await service.check_health()
    return Response()


async def version(_: EngineService, __: Request) -> Response:
    """The server's version."""
    return json_response({"version": __version__})


async def metrics(service: EngineService, _: Request) -> Response:
    """For Prometheus."""
    return Response(exposition(service.engine.get_metrics()), media_type=CONTENT_TYPE)


async def load(service: EngineService, _: Request) -> Response:
    """Requests that generate now."""
    return json_response({"server_load": service.num_open})


async def server_info(service: EngineService, _: Request) -> Response:
    """Limits and settings that matter to clients."""
    config = service.config
    return json_response(
        {
            "version": __version__,
            "model": service.model_names[0],
            "max_model_len": config.model.max_model_len,
            "dtype": config.model.dtype,
            "max_n": config.scheduler.max_n,
            "max_logprobs": config.model.max_logprobs,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "max_queue_size": service.args.max_queue_size,
            "enable_prefix_caching": config.cache.enable_prefix_caching,
        }
    )


async def models(service: EngineService, _: Request) -> Response:
    """The model, under all its names."""
    return json_response({"object": "list", "data": [_model(service, name) for name in service.model_names]})


async def one_model(service: EngineService, request: Request) -> Response:
    """One of the names."""
    name = request.path_params["model"]
    service.check_model(name)
    return json_response(_model(service, name))


def _model(service: EngineService, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "vllm",
        "root": service.model_names[0],
        "parent": None,
        "max_model_len": service.max_model_len,
        "permission": [],
    }


# ---- tokens


async def tokenize(service: EngineService, request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    body = read_body(TokenizeBody, await read_json(request, service.args.max_body_size))
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("give prompt or messages, one of them", "prompt")
    tokenizer = service.tokenizer
    if body.messages is not None:
        tools = read_tools(ChatBody(messages=body.messages, tools=body.tools))
        text, special = await render_chat(service, body, tools.for_template), False
    else:
        assert body.prompt is not None
        text, special = body.prompt, True
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    ids = await service.in_thread(tokenizer.encode, text, special)
    answer = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.id_to_token(token_id) or "" for token_id in ids]
    return json_response(answer)


async def detokenize(service: EngineService, request: Request) -> Response:
    """The text of token ids."""
    body = read_body(DetokenizeBody, await read_json(request, service.args.max_body_size))
    service.check_model(body.model)
    tokenizer = service.tokenizer
    tokens = body.tokens
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise BadRequestError("tokens must be a list of token ids", "tokens")
    if tokens and not 0 <= min(tokens) <= max(tokens) < service.engine.model_info.vocab_size:
        raise BadRequestError(f"tokens must be between 0 and {service.engine.model_info.vocab_size - 1}", "tokens")
    return json_response({"prompt": await service.in_thread(tokenizer.decode, tokens, False)})


# ---- control


async def reset_prefix_cache(service: EngineService, _: Request) -> Response:
    """Forget cached prompts; 503 while requests hold some."""
    if not await service.engine.reset_prefix_cache():
        raise HTTPError(503, "the prefix cache is in use; try again when no request runs")
    return Response()


async def abort_requests(service: EngineService, request: Request) -> Response:
    """End requests by the ids that their answers carry; they answer with what they have. Unknown ids are no error."""
    body = read_body(AbortBody, await read_json(request, service.args.max_body_size))
    await service.engine.abort([own for request_id in body.request_ids for own in service.abort(request_id)])
    return Response()


async def sleep(service: EngineService, request: Request) -> Response:
    """Give memory back (?level=1: the KV cache, 2: the weights too)."""
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise BadRequestError("level must be 1 or 2", "level")
    await service.engine.sleep(int(level))
    return Response()


async def wake_up(service: EngineService, request: Request) -> Response:
    """Take memory again (?tags=weights&tags=kv_cache for a part of it)."""
    await service.engine.wake_up(request.query_params.getlist("tags") or None)
    return Response()


async def is_sleeping(service: EngineService, _: Request) -> Response:
    """Whether any memory was given back."""
    return json_response({"is_sleeping": await service.engine.is_sleeping()})


async def check_integrity(service: EngineService, _: Request) -> Response:
    """200 if the engine is idle and all tables are empty; else 503 with the numbers."""
    try:
        await service.engine.check_integrity()
    except IntegrityError as error:
        raise HTTPError(503, str(error)) from None
    return Response()


_DEVELOPMENT: tuple[tuple[str, str, Handler, type[Body] | None], ...] = (
    ("POST", "/sleep", sleep, None),
    ("POST", "/wake_up", wake_up, None),
    ("GET", "/is_sleeping", is_sleeping, None),
    ("POST", "/check_integrity", check_integrity, None),
)
_ROUTES: tuple[tuple[str, str, Handler, type[Body] | None], ...] = (
    ("GET", "/health", health, None),
    ("GET", "/ping", health, None),
    ("POST", "/ping", health, None),
    ("GET", "/version", version, None),
    ("GET", "/metrics", metrics, None),
    ("GET", "/load", load, None),
    ("GET", "/server_info", server_info, None),
    ("GET", "/v1/models", models, None),
    ("GET", "/v1/models/{model:path}", one_model, None),
    ("POST", "/v1/completions", create_completion, CompletionBody),
    ("POST", "/v1/chat/completions", create_chat_completion, ChatBody),
    ("POST", "/tokenize", tokenize, TokenizeBody),
    ("POST", "/detokenize", detokenize, DetokenizeBody),
    ("POST", "/reset_prefix_cache", reset_prefix_cache, None),
    ("POST", "/abort_requests", abort_requests, AbortBody),
)


def build_app(service: EngineService) -> FastAPI:
    """Everything but the socket."""
    args = service.args
    around = [Middleware(RequestId, access_log=not args.disable_access_log)]
    if args.allowed_origins:
        around.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(args.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
                expose_headers=["X-Request-Id"],
            )
        )
    if args.api_keys:
        around.append(Middleware(ApiKey, keys=args.api_keys, root_path=args.root_path))
    around.append(Middleware(Gate, service=service))
    documented = not args.disable_fastapi_docs
    app = FastAPI(
        title="vllm",
        version=__version__,
        docs_url="/docs" if documented else None,
        redoc_url="/redoc" if documented else None,
        openapi_url="/openapi.json" if documented else None,
        root_path=args.root_path,
        middleware=around,
    )
    for method, path, handler, body in (*_ROUTES, *(_DEVELOPMENT if envs.VLLM_SERVER_DEV_MODE else ())):
        _add_route(app, service, method, path, handler, body)
    if args.page:
        _add_page(app)
    for kind in (HTTPException, 404, 405):
        app.add_exception_handler(kind, _http_exception)
    return app


def _add_route(
    app: FastAPI, service: EngineService, method: str, path: str, handler: Handler, body: type[Body] | None
) -> None:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(service, request)
        except Exception as error:  # noqa: BLE001 - every exception has an answer
            told = as_http_error(error)
            if told.status != CLIENT_GONE:
                logger.debug("%s %s: %s", method, path, told)
            return error_response(told)

    extra: dict[str, Any] = {"responses": {"4XX": {"description": "what the caller can mend"}}}
    if body is not None:
        schema = body.model_json_schema()
        definitions = schema.pop("$defs", {})
        extra["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {"schema": body.model_json_schema(ref_template="#/components/schemas/{model}")}
            },
        }
        definitions = extra["requestBody"]["content"]["application/json"]["schema"].pop("$defs", {})
        _inline(extra, definitions)
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=f"{handler.__name__}_{method.lower()}",
        summary=(handler.__doc__ or (body.__doc__ if body else "") or "").strip().splitlines()[0],
        response_class=Response,
        openapi_extra=extra,
    )


def _inline(value: Any, definitions: dict[str, Any]) -> None:
    """Put definitions in the place of references to them."""
    if isinstance(value, dict):
        reference = value.pop("$ref", None)
        if reference is not None:
            value.update(definitions[reference.rsplit("/", 1)[-1]])
        for entry in value.values():
            _inline(entry, definitions)
    elif isinstance(value, list):
        for entry in value:
            _inline(entry, definitions)


async def _http_exception(_: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    text = {404: "there is no such path", 405: "this path does not take that method"}.get(status, "request refused")
    return error_response(HTTPError(status, text, headers=getattr(error, "headers", None)))


# ---- the page

_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PAGE_FILES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def _add_page(app: FastAPI) -> None:
    folder = resources.files("vllm.entrypoints.openai") / "page"
    for name, kind in _PAGE_FILES.items():
        file = folder / name
        if not file.is_file():
            continue
        response = Response(file.read_bytes(), media_type=kind, headers=_PAGE_HEADERS)
        app.add_api_route("/" if name == "index.html" else f"/page/{name}", _page(response), include_in_schema=False)


def _page(response: Response) -> Callable[[], Awaitable[Response]]:
    async def show() -> Response:
        return response

    return show


if __name__ == "__main__":  # how older scripts start the server
    from vllm.entrypoints.cli.main import main

    sys.exit(main(["serve", *sys.argv[1:]]))

"""An OpenAI-compatible server that streams made-up tokens, and fails in the ways that servers do."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from aiohttp import web

METRICS = 'vllm:prompt_tokens_computed_total{model_name="fake",engine="0"} %d\n'


class FakeServer:
    """Runs in a thread of its own until `stop`.

    Args:
        die_after: after so many requests connections are cut in the middle of the stream.
        max_n: larger n gets a 400.
        no_done: streams end without [DONE].
    """

    def __init__(
        self, *, die_after: int | None = None, max_n: int = 64, no_done: bool = False, delay: float = 0.0, port: int = 0
    ) -> None:
        self.die_after, self.max_n, self.no_done, self.delay = die_after, max_n, no_done, delay
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.live = self.most = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(port,))
        self._thread.start()
        assert self._ready.wait(30)

    def _serve(self, port: int) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", port)
        self._loop.run_until_complete(site.start())
        self.port = int(runner.addresses[0][1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="# HELP x y\n" + METRICS % (10 * len(self.bodies)))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        number = len(self.bodies)
        n = body.get("n", 1)
        if n > self.max_n:
            message = f"n must be at most {self.max_n}, got {n}"
            return web.json_response({"error": {"message": message, "type": "x", "code": 400}}, status=400)
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            return await self._stream(request, body, n, number, chat=chat)
        finally:
            self.live -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], n: int, number: int, *, chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = body["max_completion_tokens" if chat else "max_tokens"]

        async def send(event: dict[str, Any] | str) -> None:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())

        if chat:
            for index in range(n):
                await send({"choices": [{"index": index, "delta": {"role": "assistant", "content": ""}}]})
        for token in range(tokens):
            if self.die_after is not None and number > self.die_after and token == 1:
                assert request.transport is not None
                request.transport.abort()
                return response
            await asyncio.sleep(self.delay)
            for index in range(n):
                reason = "length" if token == tokens - 1 else None
                piece = {"delta": {"content": "ä "}} if chat else {"text": "ä "}
                await send({"choices": [{"index": index, "finish_reason": reason, **piece}]})
        usage = {"prompt_tokens": 11, "completion_tokens": n * tokens}
        await send({"choices": [], "usage": usage})
        if not self.no_done:
            await send("[DONE]")
        return response

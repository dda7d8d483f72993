"""The engine as the server's handlers see it: whether it can be used, how much may wait, and its requests' outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.entrypoints.openai.errors import HTTPError, retry_later
from vllm.entrypoints.openai.tracing import Tracer
from vllm.exceptions import BadRequestError, EngineDeadError, QueueFullError
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.front_end import default_sampling_params
from vllm.v1.metrics.loggers import StatsLogger
from vllm.v1.structured_output.grammar import check as check_constraint

if TYPE_CHECKING:
    from vllm.entrypoints.openai.server_args import ServerArgs
    from vllm.tokenizers import Tokenizer
    from vllm.v1.engine.collector import RequestOutputCollector

logger = init_logger(__name__)

T = TypeVar("T")

CHECK_SECONDS = 0.1
"""How often it is looked whether the engine lives. (It tells by itself as well; this is what acts upon it.)"""
RESTART_LIMIT = 5
"""Restarts within RESTART_WINDOW seconds, after which the server gives up."""
RESTART_WINDOW = 300.0
SEPARATOR = "\x1f"
"""Stands in ids of a request's prompts, and in no id that a client can choose."""


class EngineService:
    """One engine, and its successor when it is started again.

    Args:
        engine: started.
        args: of the server.
        restart: makes another engine, in a thread; None: the end of the engine is the end of the server.
        on_end: called once when the engine has died for good.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        args: ServerArgs,
        restart: Callable[[], AsyncLLM] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._engine: AsyncLLM | None = engine
        self.args = args
        self.config = engine.vllm_config
        self.model_names = args.model_names(self.config.model.model)
        self.draining = False
        """Set when the server is about to stop: nothing new is taken."""
        self.num_open = 0
        """HTTP requests that generate, or are about to; counted by the gate."""
        self.created = int(time.time())
        self.defaults: SamplingParams = default_sampling_params(engine.model_info.generation_config)
        """The model's own; max_tokens None (to the end of the context) unless it says something else."""
        if engine.model_info.generation_config.get("max_new_tokens") is None:
            self.defaults.max_tokens = None
        self.threads = ThreadPoolExecutor(2, "vllm-server")
        self._restart = restart
        self._on_end = on_end
        self._restarts: list[float] = []
        self._reserved = 0
        """Children of requests that have been admitted and are not in the engine yet."""
        self._live: dict[str, list[str]] = {}
        """Ids in the engine, by the id that the client knows."""
        self._watch: asyncio.Task[None] | None = None
        self._stats = StatsLogger(engine.metrics)
        endpoint = self.config.observability.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint, self.model_names[0])

    # ---- the engine

    @property
    def engine(self) -> AsyncLLM:
        """Raises EngineDeadError while there is none."""
        engine = self._engine
        if engine is None or engine.errored:
            raise EngineDeadError
        return engine

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise BadRequestError("this server has no tokenizer (skip_tokenizer_init): give token ids", "prompt")
        return tokenizer

    @property
    def max_model_len(self) -> int:
        return self.config.model.max_model_len

    async def check_health(self) -> None:
        """Raises HTTPError 503 while nothing can be served."""
        if self.draining:
            raise HTTPError(503, "the server is stopping", headers=retry_later())
        await self.engine.check_health()

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.model_names:
            raise HTTPError(404, f"the model {name!r:.200} does not exist; there is {self.model_names[0]!r}", "model")

    def start(self) -> None:
        """Begin to watch the engine, in the running loop."""
        self._watch = asyncio.create_task(self._keep_watch())
        self._watch.add_done_callback(self._watch_ended)

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        """The watch must not end by a fault of its own without anybody's notice."""
        if not watch.cancelled() and watch.exception() is not None:
            logger.error("watching the engine failed", exc_info=watch.exception())
            if self._on_end is not None:
                self._on_end()

    async def _keep_watch(self) -> None:
        next_stats = time.monotonic() + StatsLogger.SECONDS
        while True:
            engine = self._engine
            assert engine is not None
            try:
                await engine.check_health()
            except EngineDeadError as error:
                logger.error("the engine has died: %s", error)
                engine.shutdown()
                if not await self._start_again():
                    if self._on_end is not None:
                        self._on_end()
                    return
                continue
            if time.monotonic() >= next_stats:
                next_stats = time.monotonic() + StatsLogger.SECONDS
                if self.config.observability.log_stats:
                    self._stats.log()
            await asyncio.sleep(CHECK_SECONDS)

    async def _start_again(self) -> bool:
        now = time.monotonic()
        self._restarts = [moment for moment in self._restarts if now - moment < RESTART_WINDOW]
        if self._restart is None or self.draining or len(self._restarts) >= RESTART_LIMIT:
            return False
        self._restarts.append(now)
        logger.warning("starting the engine again")
        self._engine = None
        try:
            engine = await asyncio.get_running_loop().run_in_executor(None, self._restart)
        except Exception:
            logger.exception("the engine could not be started again")
            return False
        self._stats = StatsLogger(engine.metrics)
        self._engine = engine
        logger.info("the engine serves again")
        return True

    def shutdown(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self.tracer is not None:
            self.tracer.shutdown()
        if self._engine is not None:
            self._engine.shutdown()
        self.threads.shutdown(wait=False, cancel_futures=True)

    # ---- requests

    def in_thread(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self.threads, function, *args)

    async def check_params(self, params: SamplingParams) -> None:
        """Raises BadRequestError. A constraint is tried out in another thread."""
        if params.constraint is not None:
            await self.in_thread(check_constraint, params.constraint)
        self.engine.processor.check_params(params, params.output_kind)

    def admit(self, children: int) -> None:
        """Raises QueueFullError if so many more children cannot wait now, BadRequestError if they never could."""
        bound = self.args.max_queue_size + self.config.scheduler.max_num_seqs
        if children > bound:
            raise BadRequestError(
                f"the request asks for {children} completions (prompts × n), and this server takes at most {bound}", "n"
            )
        present = self.engine.output_processor.num_children + self._reserved
        if present + children > bound:
            raise QueueFullError(f"the server is busy: {present} completions are running or waiting; try again later")

    async def submit(
        self,
        request_id: str,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams],
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> Running:
        """All prompts of one HTTP request, or none. Raises what the engine raises, and as `admit`."""
        engine = self.engine
        if request_id in self._live:
            raise BadRequestError(f"a request with id {request_id!r:.140} is running already", "request_id")
        children = sum(own.num_children for own in params)
        self.admit(children)
        running = Running(self, engine, request_id, params, headers or {})
        self._live[request_id] = running.ids
        self._reserved += children
        try:
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                own_id = request_id if len(prompts) == 1 else f"{request_id}{SEPARATOR}{index}"
                collector = await engine.add_request(own_id, prompt, own, priority=priority)
                running.ids.append(own_id)
                running.collectors.append(collector)
        except BaseException:
            running.close()
            raise
        finally:
            self._reserved -= children
        return running

    def abort(self, request_id: str) -> list[str]:
        """Engine ids to abort for an id that a client knows; they end with what they have."""
        return list(self._live.get(request_id, ()))

    async def abort_all(self) -> None:
        await self.engine.abort([own_id for ids in self._live.values() for own_id in ids])

    def ended(self, request_id: str) -> None:
        self._live.pop(request_id, None)


class Running:
    """The engine's requests of one HTTP request, one per prompt. To be closed in every case: what has not ended then is
    aborted."""

    def __init__(
        self,
        service: EngineService,
        engine: AsyncLLM,
        request_id: str,
        params: Sequence[SamplingParams],
        headers: Mapping[str, str],
    ) -> None:
        self._service = service
        self._params = params
        self._headers = headers
        self._engine = engine
        self._request_id = request_id
        self._pumps: list[asyncio.Task[None]] = []
        self._finished = 0
        self.ids: list[str] = []
        self.collectors: list[RequestOutputCollector] = []

    async def final(self) -> list[RequestOutput]:
        """The only output of each prompt, in order (FINAL_ONLY)."""
        outputs = []
        try:
            for collector in self.collectors:
                outputs.append(await collector.get())
                self._ended(len(outputs) - 1, outputs[-1])
        finally:
            self.close()
        return outputs

    async def stream(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, output), as they come."""
        try:
            if len(self.collectors) == 1:
                collector = self.collectors[0]
                while True:
                    output = collector.get_nowait() or await collector.get()
                    if output.finished:
                        self._ended(0, output)
                    yield 0, output
                    if output.finished:
                        return
            queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(1)  # the collectors merge
            self._pumps = [asyncio.create_task(_pump(queue, *entry)) for entry in enumerate(self.collectors)]
            while self._finished < len(self.collectors):
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item.finished:
                    self._ended(index, item)
                yield index, item
        finally:
            self.close()

    def _ended(self, index: int, output: RequestOutput) -> None:
        """One of the prompts has its last output."""
        self._finished += 1
        tracer = self._service.tracer
        if tracer is not None:
            tracer.record(self._headers, self._params[index], output)

    def close(self) -> None:
        """Also twice."""
        for pump in self._pumps:
            pump.cancel()
        if self._finished < len(self.ids):
            self._engine._abort_handles(self._engine.output_processor.abort(self.ids))
        self.ids = []
        self._service.ended(self._request_id)


async def _pump(
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception]], index: int, collector: RequestOutputCollector
) -> None:
    try:
        finished = False
        while not finished:
            output = await collector.get()
            finished = output.finished
            await queue.put((index, output))
    except Exception as error:  # noqa: BLE001 - raised where the queue is read
        await queue.put((index, error))
